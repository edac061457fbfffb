// Small helpers for elements.

type Attributes = Record<string, string | number | boolean | undefined>;

/** Returns the element with an id. The page is fixed, so that a missing one is a mistake of the build. */
export function byId<T extends Element = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element #${id}`);
  return found as unknown as T;
}

/** Sets attributes; false and undefined remove one. */
export function set(element: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) element.removeAttribute(name);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Creates an HTML element. */
export function html(name: string, attributes: Attributes = {}, ...children: (Node | string)[]): HTMLElement {
  const element = document.createElement(name);
  set(element, attributes);
  element.append(...children);
  return element;
}

/** Creates an SVG element. */
export function svg(name: string, attributes: Attributes = {}, ...children: (Node | string)[]): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  set(element, attributes);
  element.append(...children);
  return element;
}

/** Formats a number with a real minus sign. */
export function format(value: number, digits = 2): string {
  const text = value.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "\u2212");
}

/** Returns whether the reader asked for less motion. */
export function isStill(): boolean {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
