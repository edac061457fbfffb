/** The worker of the page. It computes samples, so that the page stays responsive. */

import type { Request } from "./protocol";
import { Scheduler } from "./scheduler";

// A message to itself arrives after those of the page. A timer would wait at least 4 ms.
const channel = new MessageChannel();
const waiting: (() => void)[] = [];
channel.port1.onmessage = () => waiting.shift()?.();

const scheduler = new Scheduler(
  (reply) => postMessage(reply),
  (call) => {
    waiting.push(call);
    channel.port2.postMessage(null);
  },
);

addEventListener("message", (event: MessageEvent<Request>) => scheduler.receive(event.data));
