/** The messages between the page and the worker that computes samples. */

/** What a sample depends on, besides the network. */
export interface Settings {
  /** Steps of the sampler, without the last call of the analytic one. */
  steps: number;
  /** Seed of the noise. */
  seed: number;
  /** Number of the sample. */
  sample: number;
  /** Replace a score by that of the nearest posterior. */
  repair: boolean;
  /** Divides the logits of the posterior. */
  temperature: number;
  /** Tokens that stay as they are, -1 at free positions; null: all are free. */
  clamp: Int32Array | null;
}

/** The state before a step and what the network predicts there. */
export interface Frame {
  /** Time of the state. */
  t: number;
  /** Tokens [length]. */
  tokens: Int32Array;
  /** Prediction at this state; null for the sample itself, at t = 0. */
  prediction: Prediction | null;
}

/** What the network predicts at a state. */
export interface Prediction {
  /** Posterior [length * states]; without repair of a score its signed posterior. */
  probabilities: Float64Array;
  /** Class of the score at every position, as in `CLASS_NAMES`. */
  classes: Uint8Array;
  /** Negative mass of the sampler's weights over the free positions. */
  droppedMass: number;
}

/** What the page asks for. A newer request for a sample of a network ends the older one. */
export type Request =
  | { kind: "load"; name: string; weights: string }
  | { kind: "sample"; name: string; run: number; settings: Settings };

/** What the worker answers: the size of a network; the frames of a run, one at a time; or an error. */
export type Reply =
  | { kind: "loaded"; name: string; length: number; states: number; config: unknown }
  | { kind: "frame"; name: string; run: number; index: number; count: number; frame: Frame }
  | { kind: "failed"; name: string; message: string };
