/** The networks, samplers and classifications of the library, for the lab. */

export { makeModel, T_MIN, type Model } from "./model";
export { makePlan, reverseStep, startTokens, type Move, type StepOptions, type StepResult } from "./sampling";
export { decodeWeights, type Weights } from "./weights";
