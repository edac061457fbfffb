// Typesets formulas with KaTeX: reads [{page, tex, display}] from the standard input and writes a list of HTML.
import { readFileSync } from "node:fs";

import katex from "katex";

const formulas = JSON.parse(readFileSync(0, "utf8"));
const typeset = formulas.map(({ page, tex, display }) => {
  try {
    const markup = katex.renderToString(tex, { displayMode: display, strict: "error", throwOnError: true });
    return display ? `<div class="formula">${markup}</div>` : markup;
  } catch (error) {
    process.stderr.write(`${page}: ${tex}\n${error.message}\n`);
    process.exit(1);
  }
});
process.stdout.write(JSON.stringify(typeset));
