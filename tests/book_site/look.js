// Run in a page by checker.py; gives a list of complaints.
() => {
  const found = [];
  const content = document.querySelector("article") ?? document.querySelector("main") ?? document.body;
  const brief = (text) => text.trim().replace(/\s+/g, " ").slice(0, 80);

  // Formulas: TeX that nothing has rendered, and what MathJax could not read. Code may have dollars.
  const raw = /\\[()[\]]|\$\$|\$(?=\S)[^$\n]*[^$\s]\$(?!\d)/;
  for (const block of content.querySelectorAll("p, li, td, th, dt, dd, figcaption, div.math, h1, h2, h3, h4, h5, h6")) {
    const copy = block.cloneNode(true);
    copy.querySelectorAll("code, pre, script, style, mjx-container").forEach((part) => part.remove());
    const hit = raw.exec(copy.textContent);
    if (hit) found.push(`formula not rendered: ${brief(copy.textContent.slice(hit.index))}`);
  }
  for (const error of document.querySelectorAll("[data-mjx-error], mjx-merror, merror")) {
    found.push(`formula with an error: ${error.getAttribute("data-mjx-error") ?? brief(error.textContent)}`);
  }

  // Images: each in the text says what it shows; one of the theme, a mere ornament, may be silent.
  for (const image of document.images) {
    const name = image.getAttribute("src");
    const alt = image.getAttribute("alt");
    if (alt === null || (alt.trim() === "" && content.contains(image))) found.push(`image without alt text: ${name}`);
    if (image.naturalWidth === 0) found.push(`image that cannot be shown: ${name}`);
  }

  // Width: nothing wider than the window, unless it scrolls in a box of its own.
  const width = document.documentElement.clientWidth;
  const over = Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) - width;
  if (over > 0) {
    const wide = [...document.body.querySelectorAll("*")].filter((element) => element.scrollWidth > width).pop();
    found.push(`the page is ${over} px wider than the window: ${brief(wide?.textContent ?? "")}`);
  }
  const boxed = (element) => {
    for (let box = element; box && box !== document.body; box = box.parentElement) {
      const style = getComputedStyle(box);
      if (style.clipPath !== "none" || style.clip !== "auto" || style.visibility === "hidden") return true;
      if (box !== element && ["auto", "scroll"].includes(style.overflowX)) return box.getBoundingClientRect().right <= width + 1;
    }
    return false;
  };
  for (const element of content.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    if (box.width > 0 && box.right > width + 1 && !boxed(element)) {
      found.push(`wider than the window: <${element.localName} class="${element.getAttribute("class") ?? ""}"> ${brief(element.textContent)}`);
      break;
    }
  }
  return found;
}
