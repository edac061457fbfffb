for (const slider of document.querySelectorAll("[data-slider]")) {
  const input = slider.querySelector("input"), output = slider.querySelector("output");
  const steps = input.dataset.steps.split(" ");
  const show = () => {
    output.textContent = steps[input.value];
    input.setAttribute("aria-valuetext", `${steps[input.value]} steps`);
    for (const figure of slider.querySelectorAll("[data-at]")) figure.hidden = figure.dataset.at !== steps[input.value];
  };
  input.addEventListener("input", show);
  show();
}
