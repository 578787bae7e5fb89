// Plays the rounds of the page. `rounds` is a list of [accepted, rejected, own]: pieces of text, one for each token.
// Every piece is set as text, never as markup.
"use strict";

const $ = id => document.getElementById(id);
const rounds = JSON.parse($("rounds").textContent);
const last = rounds.length - 1;
const spans = [...$("text").children];  // The text of each round.
const blanks = {" ": "\u2423", "\t": "\u21e5", "\n": "\u21b5"};  // How a token's white space is shown.

const begins = spans.map((span, index) => !index || span.querySelector(".dim") !== null);  // Reads a prompt.

let at = 0;  // The round that is shown.
let timer = 0;  // Not 0 while the page plays.

// The box of one token. A piece is empty if its token ends within a character.
const token = (tag, verdict) => piece => {
  const box = document.createElement("span");
  const text = piece.replace(/[ \t\n]/g, blank => blanks[blank]) || "\u2026";
  box.appendChild(document.createElement(tag)).textContent = text;
  box.appendChild(document.createElement("small")).textContent = verdict;
  return box;
};

// How many tokens of a kind (0, 1 or 2) there are up to the shown round.
const count = kind => rounds.slice(0, at + 1).reduce((sum, round) => sum + round[kind].length, 0);

function show(round) {
  spans[at].className = "";
  at = Math.max(0, Math.min(last, round));
  spans[at].className = "now";
  $("text").replaceChildren(...spans.slice(0, at + 1));
  spans[at].scrollIntoView({block: "nearest"});
  const [accepted, rejected, own] = rounds[at];
  // The target's own token replaces the first rejected guess; the guesses after it are dropped. If the text ended
  // before, there is no own token, and all of them are dropped.
  $("row").replaceChildren(
    ...accepted.map(token("u", "accepted")),
    ...rejected.slice(0, own.length).map(token("del", "rejected")),
    ...rejected.slice(own.length).map(token("del", "dropped")),
    ...own.map(token("b", "target")));
  const [kept, lost, added] = [0, 1, 2].map(count);
  const read = begins.slice(0, at + 1).filter(Boolean).length;  // Prompts.
  const prompt = at ? "The next prompt is read" : "The prompt is read";
  $("where").textContent = begins[at] ? prompt : `Round ${at} of ${last}`;
  $("tokens").textContent = kept + added;
  $("forwards").textContent = at + 1;
  $("guesses").textContent = `${kept} of ${kept + lost}`;
  $("mean").textContent = at >= read ? ((kept + added - read) / (at + 1 - read)).toFixed(2) : "\u2013";
  $("slider").value = at;
  if (!timer) {
    try {
      history.replaceState(null, "", "#" + at);
    } catch { }  // Browsers limit how often the address may change.
  }
}

// Stop, and show a round.
function go(round) {
  clearInterval(timer);
  timer = 0;
  $("play").textContent = "Play";
  show(round);
}

// Play, or pause.
function play() {
  if (timer) return go(at);
  if (at === last) show(0);
  $("play").textContent = "Pause";
  timer = setInterval(() => at + 1 < last ? show(at + 1) : go(last), 1000 / $("speed").value);
}

const actions = {
  first: () => go(0),
  back: () => go(at - 1),
  play,
  forward: () => go(at + 1),
  last: () => go(last),
};
const keys = {Home: "first", ArrowLeft: "back", " ": "play", ArrowRight: "forward", End: "last"};

onkeydown = event => {
  const native = event.key === " " ? "button, select, #clean" : "select";  // These use the key themselves.
  if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || event.target.matches(native)) return;
  event.preventDefault();
  $(keys[event.key]).click();
};

// The address may end with the number of a round, or with #play.
onhashchange = () => {
  if (location.hash === "#play") {
    go(0);
    play();
  } else {
    go(parseInt(location.hash.slice(1), 10) || 0);
  }
};

if (last >= 0) {
  for (const id in actions) $(id).onclick = actions[id];
  $("slider").max = last;
  $("slider").oninput = event => go(Number(event.target.value));
  $("speed").onchange = () => {
    if (timer) {
      go(at);
      play();
    }
  };
  document.body.className = "live";
  $("player").hidden = false;
  onhashchange();
}
