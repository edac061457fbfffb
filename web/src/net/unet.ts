/** The U-Net of `m2s.models.unet` for one image. Features are stored pixel by pixel, channels last. */

import { Condition } from "./condition";
import { applyLinear, attend, multiply, silu, type Linear } from "./linear";
import type { Network } from "./network";
import type { Parameters } from "./parameters";

const EPSILON = 1e-6;

/** The part of the configuration of a U-Net that its forward pass depends on. */
export interface UNetConfig {
  states: number;
  shape: number[];
  multipliers: number[];
  layers: number;
  groups: number | null;
}

/** Features of an image [height, width, channels]. */
interface Image {
  height: number;
  width: number;
  channels: number;
  data: Float64Array;
}

/** A 3 x 3 convolution with padding 1, or a 1 x 1 convolution. Its weight is [outputs, rows, columns, inputs]. */
interface Convolution {
  layer: Linear;
  inputs: number;
  size: number;
  stride: number;
}

let patches = new Float64Array(0); // shared by all convolutions

function readConvolution(parameters: Parameters, stride = 1): Convolution {
  const [outputs, inputs, size] = parameters.shape("weight") as [number, number, number, number];
  const given = parameters.values("weight");
  const weight = new Float64Array(given.length);
  const area = size * size;
  for (let o = 0; o < outputs; o++) {
    for (let i = 0; i < inputs; i++) {
      for (let at = 0; at < area; at++) weight[(o * area + at) * inputs + i] = given[(o * inputs + i) * area + at];
    }
  }
  return { layer: { inputs: area * inputs, outputs, weight, bias: parameters.values("bias") }, inputs, size, stride };
}

/** Applies a convolution, as one product with the patches around each pixel of the result. */
function convolve({ layer, inputs, size, stride }: Convolution, x: Image): Image {
  if (size === 1) return { ...x, channels: layer.outputs, data: applyLinear(layer, x.data) };
  const [height, width] = [x.height / stride, x.width / stride];
  const numbers = height * width * layer.inputs;
  if (patches.length < numbers) patches = new Float64Array(numbers);
  let to = 0;
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      for (let i = row * stride - 1; i <= row * stride + 1; i++) {
        for (let j = column * stride - 1; j <= column * stride + 1; j++, to += inputs) {
          if (i < 0 || j < 0 || i >= x.height || j >= x.width) {
            patches.fill(0, to, to + inputs);
          } else {
            const from = (i * x.width + j) * inputs;
            for (let channel = 0; channel < inputs; channel++) patches[to + channel] = x.data[from + channel];
          }
        }
      }
    }
  }
  const data = multiply(patches, layer.weight, layer.bias, height * width, layer.inputs, layer.outputs);
  return { height, width, channels: layer.outputs, data };
}

/** GroupNorm: each group of channels is normalized over all pixels. */
class GroupNorm {
  private readonly weight: Float64Array;
  private readonly bias: Float64Array;
  private readonly groups: number;

  constructor(parameters: Parameters, groups: number | null) {
    this.weight = parameters.values("weight");
    this.bias = parameters.values("bias");
    this.groups = groups ?? Math.min(32, Math.floor(this.weight.length / 4));
  }

  /** Returns the norm of x plus a number for each channel. */
  apply(x: Image, shift: Float64Array | null = null): Image {
    const { channels, data } = x;
    const result = Float64Array.from(data);
    if (shift !== null) for (let i = 0; i < result.length; i++) result[i] += shift[i % channels];
    const size = channels / this.groups;
    const count = (data.length / channels) * size;
    for (let group = 0; group < this.groups; group++) {
      const [begin, end] = [group * size, (group + 1) * size];
      let mean = 0;
      for (let row = 0; row < result.length; row += channels) for (let c = begin; c < end; c++) mean += result[row + c];
      mean /= count;
      let variance = 0;
      for (let row = 0; row < result.length; row += channels) {
        for (let c = begin; c < end; c++) variance += (result[row + c] - mean) ** 2;
      }
      const factor = 1 / Math.sqrt(variance / count + EPSILON);
      for (let row = 0; row < result.length; row += channels) {
        for (let c = begin; c < end; c++) {
          result[row + c] = (result[row + c] - mean) * factor * this.weight[c] + this.bias[c];
        }
      }
    }
    return { ...x, data: result };
  }

  /** Returns silu(norm(x + shift)). */
  withSilu(x: Image, shift: Float64Array | null = null): Image {
    const result = this.apply(x, shift);
    silu(result.data);
    return result;
  }
}

function add(x: Image, y: Image): Image {
  const data = Float64Array.from(x.data);
  for (let i = 0; i < data.length; i++) data[i] += y.data[i];
  return { ...x, data };
}

/** A layer: features and the conditioning vector in, features out. */
interface Layer {
  apply(x: Image, condition: Float64Array): Image;
}

/** x + conv(silu(norm(conv(silu(norm(x))) + linear(condition)))), with x projected where the channels change. */
class Residual implements Layer {
  readonly takesSkip: boolean;
  private readonly norm1: GroupNorm;
  private readonly norm2: GroupNorm;
  private readonly conv1: Convolution;
  private readonly conv2: Convolution;
  private readonly skip: Convolution | null;
  private readonly condition: Linear;

  constructor(parameters: Parameters, groups: number | null, takesSkip: boolean) {
    this.takesSkip = takesSkip;
    this.norm1 = new GroupNorm(parameters.at("norm1"), groups);
    this.norm2 = new GroupNorm(parameters.at("norm2"), groups);
    this.conv1 = readConvolution(parameters.at("conv1"));
    this.conv2 = readConvolution(parameters.at("conv2"));
    this.skip = parameters.has("skip.weight") ? readConvolution(parameters.at("skip")) : null;
    this.condition = parameters.linear("condition");
  }

  apply(x: Image, condition: Float64Array): Image {
    const hidden = convolve(this.conv1, this.norm1.withSilu(x));
    const branch = convolve(this.conv2, this.norm2.withSilu(hidden, applyLinear(this.condition, condition)));
    return add(this.skip === null ? x : convolve(this.skip, x), branch);
  }
}

/** x + attention between all pixels, with one head. */
class PixelAttention implements Layer {
  private readonly norm: GroupNorm;
  private readonly qkv: Linear;
  private readonly out: Linear;

  constructor(parameters: Parameters, groups: number | null) {
    this.norm = new GroupNorm(parameters.at("norm"), groups);
    this.qkv = parameters.linear("qkv");
    this.out = parameters.linear("out");
  }

  apply(x: Image): Image {
    const { channels } = x;
    const pixels = x.height * x.width;
    const joint = applyLinear(this.qkv, this.norm.apply(x).data);
    const parts = [0, 1, 2].map((part) => {
      const rows = new Float64Array(pixels * channels);
      for (let i = 0; i < pixels; i++) {
        const from = (3 * i + part) * channels;
        rows.set(joint.subarray(from, from + channels), i * channels);
      }
      return rows;
    }) as [Float64Array, Float64Array, Float64Array];
    return add(x, { ...x, data: applyLinear(this.out, attend(...parts, channels)) });
  }
}

/** A convolution between two resolutions: half of it, or twice of it by nearest-neighbor interpolation. */
class Resample implements Layer {
  constructor(
    private readonly convolution: Convolution,
    private readonly up: boolean,
  ) {}

  apply(x: Image): Image {
    return convolve(this.convolution, this.up ? doubled(x) : x);
  }
}

function doubled(x: Image): Image {
  const [height, width, channels] = [2 * x.height, 2 * x.width, x.channels];
  const data = new Float64Array(height * width * channels);
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      const from = ((row >> 1) * x.width + (column >> 1)) * channels;
      data.set(x.data.subarray(from, from + channels), (row * width + column) * channels);
    }
  }
  return { height, width, channels, data };
}

/** Joins the channels of two images. */
function concatenate(x: Image, y: Image): Image {
  const channels = x.channels + y.channels;
  const data = new Float64Array(x.height * x.width * channels);
  for (let pixel = 0; pixel < x.height * x.width; pixel++) {
    data.set(x.data.subarray(pixel * x.channels, (pixel + 1) * x.channels), pixel * channels);
    data.set(y.data.subarray(pixel * y.channels, (pixel + 1) * y.channels), pixel * channels + x.channels);
  }
  return { ...x, channels, data };
}

/** A U-Net for images of one channel, with token embeddings and time. */
export class UNet implements Network {
  readonly length: number;
  private readonly condition: Condition;
  private readonly embedding: Float64Array;
  private readonly features: number;
  private readonly first: Convolution;
  private readonly down: Layer[] = [];
  private readonly middle: Layer[];
  private readonly up: Layer[] = [];
  private readonly norm: GroupNorm;
  private readonly last: Convolution;

  constructor(
    private readonly config: UNetConfig,
    parameters: Parameters,
  ) {
    const { groups, layers, multipliers, shape } = config;
    this.length = shape[0] * shape[1];
    this.condition = new Condition(parameters.at("condition"));
    this.embedding = parameters.values("embedding.weight");
    this.features = parameters.shape("embedding.weight")[1];
    this.first = readConvolution(parameters.at("first"));
    const [down, middle, up] = [parameters.at("down"), parameters.at("middle"), parameters.at("up")];
    const resolutions = multipliers.length;
    for (let i = 0; i < resolutions; i++) {
      for (let j = 0; j < layers; j++) this.down.push(new Residual(down.at(this.down.length), groups, false));
      if (i < resolutions - 1) this.down.push(new Resample(readConvolution(down.at(this.down.length), 2), false));
    }
    this.middle = [
      new Residual(middle.at(0), groups, false),
      new PixelAttention(middle.at(1), groups),
      new Residual(middle.at(2), groups, false),
    ];
    for (let i = resolutions - 1; i >= 0; i--) {
      for (let j = 0; j <= layers; j++) this.up.push(new Residual(up.at(this.up.length), groups, true));
      if (i > 0) this.up.push(new Resample(readConvolution(up.at(this.up.length).at("conv")), true));
    }
    this.norm = new GroupNorm(parameters.at("norm"), groups);
    this.last = readConvolution(parameters.at("last"));
  }

  logits(tokens: Int32Array, t: number): Float64Array {
    const [height, width] = this.config.shape as [number, number];
    const c = this.condition.at(t);
    const data = new Float64Array(this.length * this.features);
    tokens.forEach((token, i) => {
      data.set(this.embedding.subarray(token * this.features, (token + 1) * this.features), i * this.features);
    });
    let x = convolve(this.first, { height, width, channels: this.features, data });
    const skips = [x];
    for (const layer of this.down) skips.push((x = layer.apply(x, c)));
    for (const layer of this.middle) x = layer.apply(x, c);
    for (const layer of this.up) {
      x = layer.apply(layer instanceof Residual && layer.takesSkip ? concatenate(x, skips.pop()!) : x, c);
    }
    return convolve(this.last, this.norm.withSilu(x)).data;
  }
}
