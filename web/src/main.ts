// The page: three parts as tabs, the color scheme, and the address.
import { startDigits } from "./digits/view";
import { byId, set } from "./dom";
import { startSimplex } from "./simplex/view";
import { startText } from "./text/view";

const PARTS = ["simplex", "digits", "text"] as const;
type Part = (typeof PARTS)[number];
const STARTS: Record<Part, () => void> = { simplex: startSimplex, digits: startDigits, text: startText };
const started = new Set<Part>();

/** Returns the part that the address names. */
function named(): Part {
  return PARTS.find((part) => location.hash === `#${part}`) ?? "simplex";
}

/** Shows one part. It starts when it is first shown: only then are weights loaded. */
function show(part: Part): void {
  for (const one of PARTS) {
    byId(one).hidden = one !== part;
    set(byId(`tab-${one}`), { "aria-selected": String(one === part), tabindex: one === part ? 0 : -1 });
  }
  if (started.has(part)) return;
  started.add(part);
  STARTS[part]();
}

/** Lets the arrow keys move between the tabs. */
function enableTabKeys(): void {
  byId("tab-simplex").parentElement?.addEventListener("keydown", (event) => {
    const places: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1 };
    const at = PARTS.indexOf(named());
    let next: number;
    if (event.key in places) next = (at + places[event.key] + PARTS.length) % PARTS.length;
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = PARTS.length - 1;
    else return;
    event.preventDefault();
    location.hash = PARTS[next];
    byId(`tab-${PARTS[next]}`).focus();
  });
}

/** Lets the button switch between light and dark. Until then the page follows the system. */
function enableTheme(): void {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const button = byId("theme");
  const isDark = (): boolean => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const update = (): void => set(button, { "aria-pressed": String(isDark()) });
  const stored = remembered();
  if (stored) root.dataset.theme = stored;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    update();
  });
  dark.addEventListener("change", update);
  update();
}

/** Returns the color scheme of an earlier visit, or the one that was chosen in the documentation around this page. */
function remembered(): string | null {
  try {
    return localStorage.getItem("m2s-lab-theme") ?? ofDocumentation();
  } catch {
    return null; // some browsers store nothing for pages on the disk
  }
}

/** Returns the scheme that the theme of the documentation has stored. Its first choice is that of the system. */
function ofDocumentation(): string | null {
  const stored = localStorage.getItem(`${new URL("..", location.href).pathname}.__palette`);
  const palette = stored ? (JSON.parse(stored) as { index?: number; color?: { scheme?: string } }) : null;
  if (!palette?.index) return null;
  return palette.color?.scheme === "slate" ? "dark" : "light";
}

/** Stores the color scheme where the browser allows it. */
function remember(theme: string): void {
  try {
    localStorage.setItem("m2s-lab-theme", theme);
  } catch {
    // The choice then holds until the page is closed.
  }
}

enableTheme();
enableTabKeys();
addEventListener("hashchange", () => show(named()));
show(named());
performance.mark("m2s-lab-ready");
