/** An image of gray levels as a grid of cells, which the keyboard and a pointer can visit. */
import { html, set } from "../dom";

export const SIDE = 8;
export const LEVELS = 17;

/** What a cell shows. */
export interface Cell {
  /** Gray level, or -1 for a free pixel of the painted image. */
  level: number;
  /** Class of the score, or -1 where it is not shown. */
  class: number;
  isFixed: boolean;
  /** What a screen reader says after the place. */
  text: string;
}

/** What happens to a cell: it is visited, painted, or freed. */
export interface Handlers {
  visit(index: number): void;
  paint?(index: number): void;
  free?(index: number): void;
}

export class ImageGrid {
  private readonly cells: HTMLElement[] = [];
  private focused = 0;

  constructor(
    readonly root: HTMLElement,
    label: string,
    private readonly handlers: Handlers,
  ) {
    set(root, { role: "grid", "aria-label": label });
    for (let row = 0; row < SIDE; row++) {
      const line = html("div", { role: "row" });
      for (let column = 0; column < SIDE; column++) {
        const cell = html("div", { role: "gridcell", class: "cell", tabindex: this.cells.length === 0 ? 0 : -1 });
        this.cells.push(cell);
        line.append(cell);
      }
      root.append(line);
    }
    root.addEventListener("keydown", (event) => this.press(event));
    root.addEventListener("focusin", (event) => this.visit(this.cells.indexOf(event.target as HTMLElement)));
    this.enablePointer();
  }

  /** Shows an image. `marked` is the pixel that is described elsewhere on the page. */
  update(cells: readonly Cell[], marked: number): void {
    this.cells.forEach((element, i) => {
      const { level, class: kind, isFixed, text } = cells[i];
      element.style.setProperty("--level", `${Math.max(0, (100 * level) / (LEVELS - 1))}%`);
      const classes = ["cell", level < 0 && "free", isFixed && "fixed", i === marked && "marked", kind >= 0 && `class-${kind}`];
      element.className = classes.filter(Boolean).join(" ");
      set(element, { "aria-label": `row ${Math.floor(i / SIDE) + 1}, column ${(i % SIDE) + 1}: ${text}` });
    });
  }

  /** Lets a pointer visit cells, and paint while it is pressed. */
  private enablePointer(): void {
    const { root, handlers } = this;
    const at = (event: PointerEvent): number =>
      this.cells.indexOf(document.elementFromPoint(event.clientX, event.clientY) as HTMLElement);
    root.addEventListener("pointerdown", (event) => {
      const index = at(event);
      if (index < 0 || event.button !== 0) return;
      this.cells[index].focus({ preventScroll: true });
      if (!handlers.paint) return;
      event.preventDefault();
      root.setPointerCapture(event.pointerId);
      handlers.paint(index);
    });
    root.addEventListener("pointermove", (event) => {
      const index = at(event);
      if (index < 0) return;
      if (handlers.paint && root.hasPointerCapture(event.pointerId)) handlers.paint(index);
      else if (event.pointerType === "mouse") handlers.visit(index);
    });
  }

  private press(event: KeyboardEvent): void {
    const { focused, handlers } = this;
    const row = Math.floor(focused / SIDE);
    const moves: Record<string, number> = {
      ArrowLeft: focused % SIDE > 0 ? -1 : 0,
      ArrowRight: focused % SIDE < SIDE - 1 ? 1 : 0,
      ArrowUp: row > 0 ? -SIDE : 0,
      ArrowDown: row < SIDE - 1 ? SIDE : 0,
      Home: row * SIDE - focused,
      End: row * SIDE + SIDE - 1 - focused,
    };
    if (event.key in moves) this.cells[focused + moves[event.key]].focus();
    else if (handlers.paint && (event.key === " " || event.key === "Enter")) handlers.paint(focused);
    else if (handlers.free && (event.key === "Delete" || event.key === "Backspace")) handlers.free(focused);
    else return;
    event.preventDefault();
  }

  private visit(index: number): void {
    if (index < 0) return;
    set(this.cells[this.focused], { tabindex: -1 });
    set(this.cells[index], { tabindex: 0 });
    this.focused = index;
    this.handlers.visit(index);
  }
}
