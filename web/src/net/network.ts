/** A network that the lab can run. */
export interface Network {
  /** Positions of a sequence. */
  readonly length: number;
  /**
   * Returns the logits of all states at every position [length, states].
   *
   * @param tokens Noisy tokens [length].
   * @param t The time in [0, 1].
   */
  logits(tokens: Int32Array, t: number): Float64Array;
}
