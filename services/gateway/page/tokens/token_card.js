import { h, hold } from "../dom.js";
import { percent, shown } from "./probability.js";

const MARGIN_PX = 8;

/** What else could have stood in place of a token, beside that token. */
class TokenCard {
  element = h("div", { class: "token-card", id: "token-card", role: "tooltip", hidden: true });

  show(token, anchor) {
    const isListed = token.top.some(({ text }) => text === token.text);
    const rows = isListed ? token.top : [...token.top, token];
    hold(this.element,
      h("div", { class: "card-head" }, h("code", {}, quoted(token.text)), h("span", {}, `logprob ${token.logprob.toFixed(3)} · rank ${token.rank}`)),
      ...rows.map((row) => alternative(row, row.text === token.text)),
      token.draft ? h("p", {}, draftText(token.draft)) : null);
    this.element.hidden = false;
    this.#place(anchor.getClientRects()[0]);
  }

  hide() {
    this.element.hidden = true;
  }

  #place({ left, top, bottom }) {
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const x = Math.min(Math.max(left, MARGIN_PX), innerWidth - width - MARGIN_PX);
    const isBelow = bottom + height + MARGIN_PX < innerHeight;
    this.element.style.setProperty("left", `${x}px`);
    this.element.style.setProperty("top", `${isBelow ? bottom + 6 : Math.max(top - height - 6, MARGIN_PX)}px`);
  }
}

function alternative({ text, logprob }, isChosen) {
  return h("div", { class: `alternative${isChosen ? " chosen" : ""}` },
    h("code", {}, quoted(text)),
    h("span", { class: "likely", "--share": `${100 * Math.exp(logprob)}%` }),
    h("span", { class: "number" }, percent(logprob)));
}

function draftText({ text, logprob, accepted }) {
  if (accepted) return `A draft that was accepted; its drafter gave it ${percent(logprob)}.`;
  return `The draft ${quoted(text)} (${percent(logprob)}) was rejected here.`;
}

function quoted(text) {
  return `“${shown(text)}”`;
}

/** The one card of the page. */
export const card = new TokenCard();
document.body.append(card.element);
