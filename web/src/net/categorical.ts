/** Draws from weights by inverse CDF. */

/**
 * Returns the first index at which the cumulative sum of the weights exceeds u times their total.
 *
 * @param weights Non-negative weights, without normalization.
 * @param u A number in [0, 1).
 */
export function drawCategorical(weights: readonly number[], u: number): number {
  let total = 0;
  for (const weight of weights) total += weight;
  const target = u * total;
  let sum = 0;
  let last = weights.length - 1; // where rounding leaves no such index, the last of positive weight
  for (let i = 0; i < weights.length; i++) {
    sum += weights[i];
    if (sum > target) return i;
    if (weights[i] > 0) last = i;
  }
  return last;
}
