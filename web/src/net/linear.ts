/**
 * Products of matrices, the only place where the networks take time.
 *
 * Everything is stored and computed in float64. Engines compute with doubles in any case, so that float32 would save no
 * time, and the only rounding that is left between the library and this code is that of the library.
 */

/** A linear layer: output = input weight^T + bias. */
export interface Linear {
  /** Input features. */
  inputs: number;
  /** Output features. */
  outputs: number;
  /** Weight [outputs, inputs]. */
  weight: Float64Array;
  /** Bias [outputs], or null. */
  bias: Float64Array | null;
}

/**
 * Returns the product a b^T + bias of row-major matrices.
 *
 * Tiles of 4 x 4 results stay in registers, so that each number that is read is used four times.
 *
 * @param a Matrix [rows, inner].
 * @param b Matrix [columns, inner].
 * @param bias Numbers that are added to each row [columns], or null.
 * @param out Where the result is written [rows, columns].
 */
export function multiply(
  a: Float64Array,
  b: Float64Array,
  bias: Float64Array | null,
  rows: number,
  inner: number,
  columns: number,
  out: Float64Array = new Float64Array(rows * columns),
): Float64Array {
  const tiledRows = rows - (rows % 4);
  const tiledColumns = columns - (columns % 4);
  for (let i = 0; i < tiledRows; i += 4) {
    const a0 = i * inner;
    const a1 = a0 + inner;
    const a2 = a1 + inner;
    const a3 = a2 + inner;
    for (let j = 0; j < tiledColumns; j += 4) {
      const b0 = j * inner;
      const b1 = b0 + inner;
      const b2 = b1 + inner;
      const b3 = b2 + inner;
      let c00 = 0, c01 = 0, c02 = 0, c03 = 0;
      let c10 = 0, c11 = 0, c12 = 0, c13 = 0;
      let c20 = 0, c21 = 0, c22 = 0, c23 = 0;
      let c30 = 0, c31 = 0, c32 = 0, c33 = 0;
      for (let k = 0; k < inner; k++) {
        const w0 = b[b0 + k];
        const w1 = b[b1 + k];
        const w2 = b[b2 + k];
        const w3 = b[b3 + k];
        let x = a[a0 + k];
        c00 += x * w0; c01 += x * w1; c02 += x * w2; c03 += x * w3;
        x = a[a1 + k];
        c10 += x * w0; c11 += x * w1; c12 += x * w2; c13 += x * w3;
        x = a[a2 + k];
        c20 += x * w0; c21 += x * w1; c22 += x * w2; c23 += x * w3;
        x = a[a3 + k];
        c30 += x * w0; c31 += x * w1; c32 += x * w2; c33 += x * w3;
      }
      let at = i * columns + j;
      out[at] = c00; out[at + 1] = c01; out[at + 2] = c02; out[at + 3] = c03;
      at += columns;
      out[at] = c10; out[at + 1] = c11; out[at + 2] = c12; out[at + 3] = c13;
      at += columns;
      out[at] = c20; out[at + 1] = c21; out[at + 2] = c22; out[at + 3] = c23;
      at += columns;
      out[at] = c30; out[at + 1] = c31; out[at + 2] = c32; out[at + 3] = c33;
    }
  }
  for (let i = 0; i < rows; i++) {
    for (let j = i < tiledRows ? tiledColumns : 0; j < columns; j++) {
      let sum = 0;
      for (let k = 0; k < inner; k++) sum += a[i * inner + k] * b[j * inner + k];
      out[i * columns + j] = sum;
    }
  }
  if (bias !== null) {
    for (let at = 0, i = 0; i < rows; i++) for (let j = 0; j < columns; j++, at++) out[at] += bias[j];
  }
  return out;
}

/** Applies a linear layer to the rows of a matrix [rows, inputs]. */
export function applyLinear(layer: Linear, x: Float64Array, out?: Float64Array): Float64Array {
  return multiply(x, layer.weight, layer.bias, x.length / layer.inputs, layer.inputs, layer.outputs, out);
}

/** Replaces each row of a matrix by its softmax, after a multiplication by `scale`. */
export function softmaxRows(x: Float64Array, columns: number, scale = 1): Float64Array {
  for (let start = 0; start < x.length; start += columns) {
    const end = start + columns;
    let top = -Infinity;
    for (let i = start; i < end; i++) if (x[i] > top) top = x[i];
    let total = 0;
    for (let i = start; i < end; i++) total += x[i] = Math.exp((x[i] - top) * scale);
    for (let i = start; i < end; i++) x[i] /= total;
  }
  return x;
}

/**
 * Returns softmax attention of one head, softmax(q k^T / sqrt(width)) v.
 *
 * @param q Queries [length, width].
 * @param k Keys [length, width].
 * @param v Values [length, width].
 */
export function attend(q: Float64Array, k: Float64Array, v: Float64Array, width: number): Float64Array {
  const length = q.length / width;
  const weights = softmaxRows(multiply(q, k, null, length, width, length), length, 1 / Math.sqrt(width));
  const byFeature = new Float64Array(v.length);
  for (let i = 0; i < length; i++) for (let j = 0; j < width; j++) byFeature[j * length + i] = v[i * width + j];
  return multiply(weights, byFeature, null, length, length, width);
}

/** Replaces x by silu(x) = x / (1 + exp(-x)). */
export function silu(x: Float64Array): Float64Array {
  for (let i = 0; i < x.length; i++) x[i] = x[i] / (1 + Math.exp(-x[i]));
  return x;
}
