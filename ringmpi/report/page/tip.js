/* The one box that tells the numbers of what the pointer is at. */

const tip = document.body.appendChild(element("div", { class: "tip", role: "status", hidden: "" }));

/** Show a title and pairs of name and text beside a point of the page. */
function showTip(title, pairs, x, y) {
  const list = element("dl");
  for (const [name, text] of pairs) list.append(element("dt", {}, name), element("dd", {}, text));
  tip.replaceChildren(element("strong", {}, title), list);
  tip.hidden = false;
  const right = scrollX + document.documentElement.clientWidth;
  const bottom = scrollY + document.documentElement.clientHeight;
  const left = x + 16 + tip.offsetWidth > right ? x - 16 - tip.offsetWidth : x + 16;
  const top = y + 16 + tip.offsetHeight > bottom ? y - 16 - tip.offsetHeight : y + 16;
  tip.style.left = `${Math.max(scrollX + 4, left)}px`;
  tip.style.top = `${Math.max(scrollY + 4, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}
