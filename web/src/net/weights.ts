/**
 * The container of a checkpoint, as `m2s.report.lab.weights` writes it: base64 of
 *
 *     length of config.json, 4 bytes, little-endian | config.json | model.safetensors
 *
 * A page on the disk can read no file beside it, so that the container is inside a classic script.
 */

/** A checkpoint: its configuration and its tensors by name. */
export interface Weights {
  /** The parsed config.json. */
  config: unknown;
  /** Shape and values of every tensor. */
  tensors: Map<string, { shape: number[]; data: Float32Array }>;
}

interface Entry {
  dtype: string;
  shape: number[];
  data_offsets: [number, number];
}

/** Returns the bytes of base64. */
function decodeBase64(text: string): Uint8Array {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

/** Returns the numbers of a tensor in bf16, which are the upper halves of float32 numbers. */
function widen(bytes: Uint8Array): Float32Array {
  const words = new Uint32Array(bytes.length / 2);
  for (let i = 0; i < words.length; i++) words[i] = ((bytes[2 * i] | (bytes[2 * i + 1] << 8)) << 16) >>> 0;
  return new Float32Array(words.buffer);
}

/**
 * Reads a checkpoint.
 *
 * @param base64 The text that the script of the weights has set.
 * @throws The text is cut short, or a tensor is not in bf16.
 */
export function decodeWeights(base64: string): Weights {
  const bytes = decodeBase64(base64);
  const view = new DataView(bytes.buffer);
  const json = (start: number, length: number): unknown =>
    JSON.parse(new TextDecoder().decode(bytes.subarray(start, start + length)));
  const damaged = new Error(`the weights have ${bytes.length} bytes, fewer than they state: write them again with m2s`);
  if (bytes.length < 4) throw damaged;
  const configBytes = view.getUint32(0, true);
  const start = 4 + configBytes;
  if (bytes.length < start + 8) throw damaged;
  const headerBytes = Number(view.getBigUint64(start, true));
  const data = start + 8 + headerBytes;
  if (bytes.length < data) throw damaged;
  const tensors: Weights["tensors"] = new Map();
  for (const [name, entry] of Object.entries(json(start + 8, headerBytes) as Record<string, Entry>)) {
    if (name === "__metadata__") continue;
    if (entry.dtype !== "BF16") throw new Error(`tensor ${name} is in ${entry.dtype}, expected BF16: save it with bf16_weights`);
    const [begin, end] = entry.data_offsets;
    if (bytes.length < data + end) throw damaged;
    tensors.set(name, { shape: entry.shape, data: widen(bytes.subarray(data + begin, data + end)) });
  }
  return { config: json(4, configBytes), tensors };
}
