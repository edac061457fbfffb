/** The page's side of the worker: it loads weights when they are needed, and receives the frames of samples. */
import source from "worker:sampling";
import type { Frame, Reply, Request, Settings } from "./protocol";

declare global {
  // Each script of weights adds an entry.
  var m2sWeights: Record<string, string> | undefined;
}

/** What a part of the page does with the frames of a run: index 0 is noise, index count - 1 the sample. */
type Receiver = (frame: Frame, index: number, count: number) => void;

let worker: Worker | null = null;
let runs = 0;
const loads = new Map<string, { promise: Promise<void>; settle: (error?: Error) => void }>();
const receivers = new Map<string, { run: number; receive: Receiver; fail: (message: string) => void }>();

/** Loads a network, once. */
export function load(name: string): Promise<void> {
  const before = loads.get(name);
  if (before) return before.promise;
  let settle: (error?: Error) => void = () => {};
  const promise = new Promise<void>((resolve, reject) => {
    settle = (error) => (error ? reject(error) : resolve());
  });
  loads.set(name, { promise, settle });
  const script = document.createElement("script");
  script.src = `weights-${name}.js`;
  script.onload = () => {
    const weights = globalThis.m2sWeights?.[name];
    if (weights === undefined) return settle(new Error(`${script.src} holds no weights`));
    delete globalThis.m2sWeights?.[name]; // the worker has the only copy from now on
    post({ kind: "load", name, weights });
  };
  script.onerror = () => settle(new Error(`weights-${name}.js is missing: write the folder again with m2s lab --out`));
  document.head.append(script);
  return promise;
}

/** Draws a sample. A newer call for the same network ends an older one. */
export function sample(name: string, settings: Settings, receive: Receiver, fail: (message: string) => void): void {
  const run = ++runs;
  receivers.set(name, { run, receive, fail });
  post({ kind: "sample", name, run, settings });
}

/** Sends a request to the worker, which the first one starts. */
function post(request: Request): void {
  if (!worker) {
    worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    worker.onmessage = (event: MessageEvent<Reply>) => answer(event.data);
    worker.onerror = (event) => {
      for (const one of loads.values()) one.settle(new Error(event.message));
      for (const one of receivers.values()) one.fail(event.message);
    };
  }
  worker.postMessage(request);
}

/** Passes an answer on to whoever waits for it. */
function answer(reply: Reply): void {
  const receiver = receivers.get(reply.name);
  if (reply.kind === "loaded") loads.get(reply.name)?.settle();
  else if (reply.kind === "failed") {
    loads.get(reply.name)?.settle(new Error(reply.message));
    receiver?.fail(reply.message);
  } else if (receiver?.run === reply.run) receiver.receive(reply.frame, reply.index, reply.count);
}
