// Builds the lab: one classic script, one style sheet and one page, without requests of any kind.
// `npm run build` writes m2s/report/lab; `node build.mjs FOLDER` writes another folder.
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build, transform } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = resolve(process.argv[2] ?? join(here, "../m2s/report/lab"));
const script = { bundle: true, format: "iife", target: "es2022", minify: true, charset: "utf8", legalComments: "none", write: false };

/** Returns the text of a bundled entry point. */
async function bundle(entry, plugins = []) {
  const result = await build({ ...script, entryPoints: [join(here, entry)], plugins });
  return result.outputFiles[0].text;
}

// A page on the disk may start a worker only from a Blob, so that the page's script holds the worker's source as a string.
const workerSource = {
  name: "worker-source",
  setup(building) {
    building.onResolve({ filter: /^worker:/ }, () => ({ path: "worker", namespace: "worker-source" }));
    building.onLoad({ filter: /.*/, namespace: "worker-source" }, async () => ({
      contents: await bundle("src/sampling/worker.ts"),
      loader: "text",
    }));
  },
};

const css = await transform(readFileSync(join(here, "src/lab.css"), "utf8"), { loader: "css", minify: true, charset: "utf8" });
writeFileSync(join(out, "lab.js"), await bundle("src/main.ts", [workerSource]));
writeFileSync(join(out, "lab.css"), css.code);
writeFileSync(join(out, "index.html"), readFileSync(join(here, "src/index.html"), "utf8"));
