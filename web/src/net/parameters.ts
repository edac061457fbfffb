/** Reads the layers of a network from tensors by name. */

import type { Linear } from "./linear";
import type { Weights } from "./weights";

/** The tensors below one name, such as those of `down.0` of a U-Net. */
export class Parameters {
  constructor(
    private readonly tensors: Weights["tensors"],
    private readonly prefix: string,
  ) {}

  /** Returns the tensors below a name. */
  at(name: string | number): Parameters {
    return new Parameters(this.tensors, `${this.prefix}${name}.`);
  }

  /** Returns whether there is a tensor of this name. */
  has(name: string): boolean {
    return this.tensors.has(this.prefix + name);
  }

  /** Returns the shape of a tensor. */
  shape(name: string): number[] {
    return this.find(name).shape;
  }

  /** Returns the numbers of a tensor in float64. */
  values(name: string): Float64Array {
    return Float64Array.from(this.find(name).data);
  }

  /** Returns the linear layer of this name. */
  linear(name: string): Linear {
    const layer = this.at(name);
    const [outputs, inputs] = layer.shape("weight") as [number, number];
    return { inputs, outputs, weight: layer.values("weight"), bias: layer.has("bias") ? layer.values("bias") : null };
  }

  private find(name: string): { shape: number[]; data: Float32Array } {
    const found = this.tensors.get(this.prefix + name);
    if (found === undefined) throw new Error(`the weights have no tensor ${this.prefix}${name}: write them again with m2s`);
    return found;
  }
}
