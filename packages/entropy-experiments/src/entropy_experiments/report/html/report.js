"use strict";
// Draws the figures in the page's colours, and builds rollouts as text nodes while they are read.
(async () => {
  // A packed text: seven bits of a deflated one in each character (packing.py).
  const unpack = async (id) => {
    const element = document.getElementById(id);
    if (!element) return null;
    const text = element.textContent;
    const bytes = new Uint8Array(Math.ceil(text.length * 7 / 8));
    let held = 0, bits = 0, at = 0;
    for (let i = 0; i < text.length; i += 1) {
      held = ((held << 7) | (text.charCodeAt(i) & 127)) & 0x7fff;
      bits += 7;
      if (bits >= 8) {
        bits -= 8;
        bytes[at] = (held >> bits) & 255;
        at += 1;
      }
    }
    const deflated = new Blob([bytes.subarray(0, Number(element.dataset.bytes))]).stream();
    element.remove();
    return new Response(deflated.pipeThrough(new DecompressionStream("deflate-raw"))).text();
  };
  const read = async (id) => JSON.parse(await unpack(id));
  const number = (x, digits = 3) => {
    if (x === null || x === undefined) return "–";
    const size = Math.abs(x);
    const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? size.toExponential(digits - 1) : String(+size.toPrecision(digits));
    return (x < 0 ? "−" : "+") + text;
  };
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // A term's line from the glossary, for fingers and keyboards too.
  const hint = document.getElementById("hint");
  const explain = (term) => {
    if (!term) {
      hint.hidden = true;
      return;
    }
    if (term.title) {
      term.dataset.said = term.title;
      term.removeAttribute("title");
    }
    hint.textContent = term.dataset.said;
    hint.hidden = false;
    const box = term.getClientRects()[0];
    const wide = document.documentElement.clientWidth;
    hint.style.left = `${Math.max(6, Math.min(box.left, wide - hint.offsetWidth - 6)) + window.scrollX}px`;
    const below = box.bottom + 8 + hint.offsetHeight < window.innerHeight;
    hint.style.top = `${(below ? box.bottom + 6 : box.top - hint.offsetHeight - 6) + window.scrollY}px`;
  };
  for (const name of ["pointerover", "focusin", "click"]) {
    document.addEventListener(name, (event) => explain(event.target.closest && event.target.closest(".term")));
  }
  window.addEventListener("keydown", (event) => { if (event.key === "Escape") explain(null); });
  // Paper has no folds.
  window.addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details")) fold.open = true;
  });

  // Figures.
  if (typeof DecompressionStream === "undefined") {
    document.getElementById("old").hidden = false;
    return;
  }
  const figures = await read("figures");
  const plotly = document.createElement("script");
  plotly.textContent = await unpack("plotly");
  document.body.append(plotly);
  const themed = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue("--" + name).trim();
    const fill = (value) => {
      if (typeof value === "string") return value.startsWith("$") ? colour(value.slice(1)) : value;
      if (Array.isArray(value)) return value.map(fill);
      if (value && typeof value === "object") {
        return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, fill(inner)]));
      }
      return value;
    };
    return { colour, fill };
  };
  const config = { displayModeBar: false, responsive: true, displaylogo: false, showTips: false };
  const draw = () => {
    const { colour, fill } = themed();
    const narrow = window.innerWidth < 720;
    for (const place of document.querySelectorAll(".chart")) {
      const figure = figures[place.dataset.figure];
      if (!figure || place.closest("[hidden]")) continue;  // drawn when it is chosen
      const layout = fill(figure.layout);
      const axis = { gridcolor: colour("line"), zeroline: false, linecolor: colour("axis"), tickcolor: colour("axis"), ticks: "outside", ticklen: 3, automargin: true, exponentformat: "power", tickfont: { size: narrow ? 10 : 12 } };
      for (const name of ["xaxis", "yaxis"]) {
        const own = layout[name] || {};
        const title = own.title ? { ...own.title, font: { size: 12, color: colour("muted") }, standoff: 8 } : undefined;
        layout[name] = { ...axis, ...own, title, fixedrange: true };
      }
      Plotly.react(place, fill(figure.data), {
        ...layout,
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false, hovermode: "closest", bargap: 0.3,
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
        margin: { l: 8, r: 12, t: layout.showlegend ? 36 : 14, b: 8, ...layout.margin },
        showlegend: Boolean(layout.showlegend),
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: narrow ? 11 : 12, color: colour("muted") }, itemclick: false, itemdoubleclick: false, bgcolor: "rgba(0,0,0,0)" },
        hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("axis"), font: { color: colour("ink"), size: 12 } },
      }, config);
    }
  };
  draw();
  // A run's ledger: the grouping that is chosen, its drawings and its table.
  const grouping = document.getElementById("grouping");
  if (grouping) {
    const manner = document.getElementById("manner");
    const regroup = () => {
      for (const place of document.querySelectorAll("[data-chosen]")) {
        place.dataset.figure = `${place.dataset.chosen}_${grouping.value}_${manner.value}`;
      }
      for (const part of document.querySelectorAll("[data-grouping]")) part.hidden = part.dataset.grouping !== grouping.value;
      draw();
    };
    grouping.addEventListener("change", regroup);
    manner.addEventListener("change", regroup);
    document.getElementById("choices").addEventListener("submit", (event) => event.preventDefault());
    if (grouping.selectedIndex > 0 || manner.selectedIndex > 0) regroup();  // as left before a reload
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.matchMedia("(max-width: 720px)").addEventListener("change", draw);

  // Marks that would steer the text itself are shown, not obeyed.
  const visible = (text) => text
    .replace(/[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]/g, (c) => "⟨U+" + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, "␡");

  // Rollouts.
  const views = document.getElementById("views") ? await read("views") : null;
  document.documentElement.dataset.drawn = "yes";
  const refuse = (why) => {
    const said = document.getElementById("fragment");
    said.textContent = `The link's “${visible(location.hash).slice(0, 80)}” is ignored: ${why}`;
    said.hidden = false;
  };
  if (!views) {
    if (location.hash.includes("=")) refuse("this report has no rollouts.");
    return;
  }
  const PAGE = 12;
  const coloured = Boolean(views.vocabulary);
  const list = document.getElementById("list");
  const more = document.getElementById("more");
  const tip = document.getElementById("tip");
  const choose = { sort: document.getElementById("sort"), sign: document.getElementById("sign"), find: document.getElementById("find") };
  const has = (name) => views.rollouts.some((row) => row[name] !== undefined && row[name] !== null);
  const orders = {
    lowers: ["lowers entropy most", has("influence") && ((a, b) => a.influence - b.influence)],
    raises: ["raises entropy most", has("influence") && ((a, b) => b.influence - a.influence)],
    size: ["largest influence", has("influence") && ((a, b) => Math.abs(b.influence) - Math.abs(a.influence))],
    reward: ["reward, highest first", has("reward") && ((a, b) => b.reward - a.reward)],
    advantage: ["advantage, highest first", has("advantage") && ((a, b) => b.advantage - a.advantage)],
    longest: ["longest first", (a, b) => b.n - a.n],
    prompt: ["by prompt", (a, b) => a.prompt - b.prompt],
    given: ["as in the batch", (a, b) => a.i - b.i],
  };
  for (const [value, [label, order]] of Object.entries(orders)) {
    if (!order) continue;
    const option = element("option", "", label);
    option.value = value;
    choose.sort.append(option);
  }

  const texts = new Map();
  const textOf = (row) => {
    if (!texts.has(row)) {
      const response = row.text !== undefined ? row.text : (row.t || []).map((k) => views.vocabulary[k]).join("");
      texts.set(row, ((row.pid || "") + " " + views.prompts[row.p] + response).toLowerCase());
    }
    return texts.get(row);
  };
  const token = (row, k) => {
    const text = views.vocabulary[row.t[k]];
    const span = element("span", "t");
    if (text === "") {
      span.className += " mark";
      span.textContent = "▪";
    } else {
      span.textContent = visible(text).replaceAll("\n", "⏎\n");
    }
    span.dataset.k = k;
    if (row.s[k] === "1") span.className += " unsure";
    else if (row.s[k] === "2") span.className += " outside";
    else if (row.v[k] !== 0) {
      const size = Math.sqrt(Math.min(1, Math.abs(row.v[k] * views.units.influence) / views.scale));
      const name = row.v[k] < 0 ? "--destroy-rgb" : "--create-rgb";
      span.style.backgroundColor = `rgba(var(${name}), calc(${size.toFixed(3)} * var(--strongest)))`;
    }
    return span;
  };
  const nameOf = (row) => row.name === undefined ? String(row.i) : row.name;
  const card = (row) => {
    const made = element("article", "rollout");
    made.dataset.i = row.i;
    made.id = "rollout-" + row.i;
    const facts = element("div", "facts");
    const say = (name, value, strong) => {
      const item = element("span", "", name + " ");
      item.append(element(strong ? "b" : "span", "", value));
      facts.append(item);
    };
    const link = element("a", "", "rollout " + nameOf(row));
    link.href = "#rollout=" + nameOf(row);
    facts.append(link);
    if (row.uid !== null && row.uid !== undefined) say("uid", visible(row.uid).slice(0, 80));
    if (row.influence !== undefined) say("influence", number(row.influence, 2), true);
    if (row.gain !== undefined) say("on reward", number(row.gain, 2));
    if (row.advantage !== null && row.advantage !== undefined) say("advantage", number(row.advantage));
    if (row.reward !== null && row.reward !== undefined) say("reward", String(+row.reward.toPrecision(3)));
    say("prompt", row.pid || String(row.prompt));
    say("tokens", String(row.n));
    if (row.truncated) facts.append(element("span", "", "cut off"));
    made.append(facts);
    const prompt = element("bdi", "prompt", visible(views.prompts[row.p]));
    prompt.dir = "auto";
    if (prompt.textContent) made.append(prompt);
    const response = element("bdi", "response");
    response.dir = "auto";
    if (row.text !== undefined) response.textContent = visible(row.text);
    else if (!row.t) response.append(element("span", "gap", "text left out: this file holds the rollouts of most influence"));
    else {
      row.t.forEach((_, k) => {
        if (row.gaps && row.gaps[k] !== undefined) response.append(element("span", "gap", visible(row.gaps[k])));
        response.append(token(row, k));
      });
    }
    made.append(response);
    return made;
  };
  const byId = new Map(views.rollouts.map((row) => [row.i, row]));
  const byName = new Map(views.rollouts.map((row) => [nameOf(row), row]));
  let shown = [];
  let built = 0;
  const count = () => {
    const left = shown.length - built;
    more.hidden = left === 0;
    more.textContent = `Show ${Math.min(PAGE, left)} more of ${left.toLocaleString("en")}`;
    document.getElementById("count").textContent = `${built.toLocaleString("en")} of ${shown.length.toLocaleString("en")} shown`;
  };
  const extend = () => {
    for (const row of shown.slice(built, built + PAGE)) list.append(card(row));
    built = Math.min(shown.length, built + PAGE);
    count();
  };
  const restart = () => {
    const wanted = choose.find.value.toLowerCase();
    const sign = choose.sign.value;
    shown = views.rollouts.filter((row) =>
      (sign === "" || (sign === "+" ? row.advantage > 0 : row.advantage < 0)) && (wanted === "" || textOf(row).includes(wanted)));
    shown.sort(orders[choose.sort.value][1]);
    list.replaceChildren();
    built = 0;
    hide();
    extend();
  };
  const jump = (i) => {
    choose.sign.value = "";
    choose.find.value = "";
    restart();
    const row = byId.get(i);
    if (!row) return null;
    const already = document.getElementById("rollout-" + i);
    const place = already || card(row);
    if (!already) {
      // First now, and not a second time where it would have come.
      shown = [row, ...shown.filter((other) => other !== row)];
      built += 1;
      list.prepend(place);
      count();
    }
    for (const old of list.querySelectorAll(".found")) old.classList.remove("found");
    place.classList.add("found");
    place.scrollIntoView({ block: "center" });
    return place;
  };

  // The numbers of the token pointed at.
  let on = null;
  const hide = () => {
    tip.hidden = true;
    if (on) on.classList.remove("on");
    on = null;
  };
  const show = (span) => {
    const row = byId.get(Number(span.closest(".rollout").dataset.i));
    const k = Number(span.dataset.k);
    const value = row.v[k] * views.units.influence;
    const advantage = (Array.isArray(row.a) ? row.a[k] : row.a) * views.units.advantage;
    const logprob = row.l[k] * views.units.logprob;
    const what = element("bdi", "what", JSON.stringify(visible(views.vocabulary[row.t[k]]).slice(0, 80)));
    const rows = element("dl");
    const say = (name, text) => rows.append(element("dt", "", name), element("dd", "", text));
    const signed = (x) => (x < 0 ? "−" : "") + Math.abs(x).toFixed(4);
    if (row.s[k] === "2") say("influence", "none: not in the loss");
    else {
      say("influence", number(value) + " nats");
      if (row.e) {
        const error = row.e[k] * views.units.influence;
        say("± s.e.", number(error, 2).slice(1) + `, ${views.folds} parts of E`);
        if (views.t !== null) say("95 %", number(value - views.t * error, 2) + " to " + number(value + views.t * error, 2));
      } else say("95 %", "no interval: one fold");
      if (row.r) say("on reward", number(row.r[k] * views.units.reward));
      if (row.s[k] === "1") say("sign", "unsure: parts of E disagree");
    }
    say("log-prob", signed(logprob) + `  (p ${Math.exp(logprob).toPrecision(3)})`);
    say("entropy", signed(row.h[k] * views.units.entropy) + " nats");
    say("advantage", number(advantage));
    say("token", `${k} of rollout ${nameOf(row)}`);
    tip.replaceChildren(what, rows);
    hide();
    on = span;
    span.classList.add("on");
    tip.hidden = false;
    const box = span.getClientRects()[0];
    const wide = document.documentElement.clientWidth;
    const left = Math.max(6, Math.min(box.left, wide - tip.offsetWidth - 6));
    const below = box.bottom + 8 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${left + window.scrollX}px`;
    tip.style.top = `${(below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + window.scrollY}px`;
  };
  // Links to a rollout, to a token of it, or to a prompt of a run's ledger:
  // report.html#rollout=367&token=8, #rollout=12-3, #prompt=8d1f...
  const linkTo = (row, k) => `#rollout=${nameOf(row)}&token=${k}`;
  const mark = (span) => {
    for (const old of list.querySelectorAll(".cited")) old.classList.remove("cited");
    if (span) span.classList.add("cited");
  };
  const follow = () => {
    document.getElementById("fragment").hidden = true;
    const fragment = location.hash.slice(1);
    if (fragment === "" || (!fragment.includes("=") && document.getElementById(fragment))) return;
    mark(null);
    const prompt = has("pid") ? /^prompt=([0-9a-f]{1,64})$/.exec(fragment) : null;
    if (prompt) {
      if (!views.rollouts.some((row) => row.pid === prompt[1])) {
        refuse(`no rollout of prompt ${prompt[1]} is on this page; run_ledger.parquet has all of them.`);
        return;
      }
      choose.sign.value = "";
      choose.find.value = prompt[1];
      restart();
      list.scrollIntoView({ block: "start" });
      return;
    }
    const asked = /^rollout=(\d{1,9}(?:-\d{1,9})?)(?:&token=(\d{1,9}))?$/.exec(fragment);
    if (!asked) {
      refuse("expected #rollout=NUMBER or #rollout=NUMBER&token=NUMBER" + (has("pid") ? ", or #prompt=NAME." : "."));
      return;
    }
    const row = byName.get(asked[1]);
    if (!row) {
      refuse(has("pid")
        ? `rollout ${asked[1]} is not on this page; run_ledger.parquet has all of them.`
        : `there is no rollout ${asked[1]}; this report has ${views.rollouts.length}, from 0.`);
      return;
    }
    const i = row.i;
    if (asked[2] === undefined) {
      jump(i);
      return;
    }
    const k = Number(asked[2]);
    const place = jump(i);
    const span = row.t ? place.querySelector(`.t[data-k="${k}"]`) : null;
    if (!row.t) refuse(`the tokens of rollout ${asked[1]} are not in this report; the rollout is shown.`);
    else if (!span) refuse(`rollout ${asked[1]} has ${row.n} tokens, from 0; the rollout is shown.`);
    else {
      mark(span);
      span.scrollIntoView({ block: "center" });
      show(span);
    }
  };
  if (coloured) {
    list.addEventListener("pointerover", (event) => {
      const span = event.target.closest(".t");
      if (span) show(span);
    });
    list.addEventListener("pointerleave", hide);
    list.addEventListener("click", (event) => {
      const span = event.target.closest(".t");
      if (!span) {
        hide();
        return;
      }
      show(span);
      // The address bar cites the token; the page stays where it is.
      history.replaceState(null, "", linkTo(byId.get(Number(span.closest(".rollout").dataset.i)), Number(span.dataset.k)));
      mark(span);
    });
    window.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  }
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  choose.sort.addEventListener("change", restart);
  choose.sign.addEventListener("change", restart);
  choose.find.addEventListener("input", restart);
  more.addEventListener("click", extend);
  for (const place of document.querySelectorAll('[data-figure="rollouts"], [data-figure="points"]')) {
    if (place.on) place.on("plotly_click", (event) => jump(event.points[0].customdata[0]));
  }
  restart();
  window.addEventListener("hashchange", follow);
  follow();
})();
