// The page: asks, shows what comes, replays it.

const EXAMPLES = [
  ["Count", "Count from 12 to 40 in steps of 2."],
  ["A table", "Add 9 to the numbers 20 to 25."],
  ["JSON", 'Turn into JSON: name "Eva", age 27, city "Berlin", job "teacher"'],
  ["A problem", "Ada has 6 baskets with 2 shells in each, and 2 more shells. How many shells in all?"],
  ["A story", "Write a short story about a frog and a barn."],
];
const THEMES = ["auto", "light", "dark"];
const $ = (id) => document.getElementById(id);
const race = {lanes: [], at: 0, playing: false, timer: 0, running: null};

// --- what is shown ---

const length = () => Math.max(0, ...race.lanes.map((lane) => lane.trace.length));
const places = () => Math.max(1, ...race.lanes.flatMap(({trace}) =>
  trace.data.forwards.slice(-1).map((forward) => forward.start + forward.slots.length)));

function show(at) {
  race.at = Math.min(Math.max(at, 0), length());
  const scale = {forwards: length(), places: places()};
  race.lanes.forEach((lane) => lane.show(race.at, scale));
  $("slider").max = length();
  $("slider").value = race.at;
  $("slider").setAttribute("aria-valuetext", `${race.at} of ${length()} forwards`);
  $("at").textContent = `${race.at} / ${length()}`;
  $("save").disabled = !length();
}

function play(on) {
  race.playing = on;
  $("play").textContent = on ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
  clearTimeout(race.timer);
  if (on) tick();
}

// The next forward of all lanes, if it is there.
function tick() {
  const pace = Number($("pace").value), end = length();
  if (race.at < end) show(pace ? race.at + 1 : end);
  if (race.at >= end && !race.running) return finish();
  race.timer = setTimeout(tick, Math.max(pace, 30));
}

function finish() {
  play(false);
  const verdict = summary();
  if (verdict) say(verdict);
}

// The race in a sentence.
function summary() {
  const [first, second] = race.lanes.map(({trace}) => trace);
  const [name, rival] = race.lanes.map((lane) => lane.name);
  if (!first?.length) return "";
  const {tokens, forwards} = first.figures(first.length);
  const own = `${name}: ${tokens} tokens in ${forwards} forwards.`;
  if (!second?.length) return own;
  const other = second.figures(second.length);
  const [ids, theirs] = [first.ids, second.ids];
  const differs = ids.findIndex((id, place) => id !== theirs[place]);
  const same = differs < 0 && ids.length === theirs.length;
  const from = (differs < 0 ? Math.min(ids.length, theirs.length) : differs) + 1;
  const verdict = same ? "The same tokens." : `The texts differ from token ${from} on.`;
  return `${own} ${rival}: ${other.tokens} in ${other.forwards}. ${verdict}`;
}

function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong);
}

function setLanes(lanes) {
  race.lanes = lanes;
  $("lanes").replaceChildren(...lanes.map((lane) => lane.node));
  show(0);
}

// --- asking ---

// What is asked of the server; window 0 is AR.
function body(autoregressive, seed) {
  const number = (id) => $(id).value === "" ? undefined : Number($(id).value);
  const prompt = $("prompt").value, mode = $("mode").value;
  const paper = mode === "paper" && !autoregressive;
  return {
    ...($("route").value === "chat" ? {messages: [{role: "user", content: prompt}]} : {prompt}),
    mode: autoregressive ? "ar" : mode,
    window_size: autoregressive ? 0 : number("window_size"),
    entropy_threshold: paper ? number("entropy_threshold") : undefined,
    position_penalty: paper ? number("position_penalty") : undefined,
    temperature: number("temperature"), max_tokens: number("max_tokens"), seed,
  };
}

// Stops what is being decoded without a word: something else is shown now.
function leave() {
  race.running?.abort();
  race.running = null;
  $("stop").disabled = true;
  play(false);
}

async function ask() {
  leave();
  const running = race.running = new AbortController();
  const mode = $("mode").value, rival = $("rival").value, seed = Math.floor(Math.random() * 2 ** 31);
  const ours = new Lane("WeDLM", `mode ${mode}`, true);
  const theirs = rival === "none" ? null : new Lane("AR", "one token a forward", false);
  setLanes(theirs ? [ours, theirs] : [ours]);
  say("Decoding …");
  $("stop").disabled = false;
  const patience = setTimeout(
    () => say("Waiting: the server may be compiling the program that traces, once …"), 2000);
  const run = async (lane, autoregressive) => {
    lane.trace.data.prompt = $("prompt").value;
    const call = {
      route: $("route").value, key: $("key").value, signal: running.signal,
      body: body(autoregressive, seed),
    };
    lane.trace.data.finish_reason = await decode(call, (news) => {
      clearTimeout(patience);
      if (lane === ours && !lane.trace.length) say("Decoding …");
      lane.trace.add(news);
    });
    lane.trace.finished = true;
  };
  play(true);
  try {
    const first = run(ours, false);
    if (rival === "after") await first;
    await Promise.all([first, theirs && run(theirs, true)]);
    if (race.running === running && !race.playing) {  // somebody looks back meanwhile
      show(race.at);
      say(summary());
    }
  } catch (error) {
    running.abort();
    if (race.running === running) fail(error);
  } finally {
    clearTimeout(patience);
    if (race.running === running) {
      race.running = null;
      $("stop").disabled = true;
    }
  }
}

function fail(error) {
  play(false);
  if (error.status === 401) askForKey();
  say(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
}

function askForKey() {
  $("key-row").hidden = false;
  $("key").focus();
}

// --- files ---

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(
    [asFile(race.lanes.map((lane) => lane.trace))], {type: "application/json"}));
  link.download = "trace.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function open(file) {
  if (!file) return;
  try {
    const traces = fromFile(await file.text());
    leave();
    setLanes(traces.slice(0, 2).map((trace, place) => {
      const {mode, model} = trace.data;
      const lane = new Lane(mode === "ar" ? "AR" : `WeDLM, ${mode}`, model ?? "", !place);
      lane.trace = trace;
      return lane;
    }));
    $("prompt").value = traces[0].data.prompt ?? "";
    show(length());
    say(`${file.name}: ${summary()}`);
  } catch (error) {
    say(`${file.name}: ${error.message}`, true);
  }
}

// --- wiring ---

function setMode() {
  const paper = $("mode").value === "paper";
  $("entropy_threshold").disabled = $("position_penalty").disabled = !paper;
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  try { localStorage.setItem("theme", theme); } catch { /* not kept, then */ }
  show(race.at);
}

function scrub(at) {
  play(false);
  show(at);
}

// Makes the server compile the program that traces before it is asked for.
async function begin() {
  let model;
  try {
    $("model").textContent = model = await modelName($("key").value);
    say("");
  } catch (error) {
    if (error.status === 401) $("key-row").hidden = false;
    const asks = $("key").value ? "This is not the server's API key." : "This server asks for its API key.";
    say(error.status === 401 ? asks : error.message, Boolean($("key").value));
    return;
  }
  const warm = {route: "text", key: $("key").value, body: {model, prompt: "a", max_tokens: 1}};
  decode(warm, () => {}).catch(() => {});
}

for (const [name, prompt] of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.title = prompt;
  button.addEventListener("click", () => {
    $("prompt").value = prompt;
    $("route").value = "chat";
    $("ask").requestSubmit();
  });
  $("examples").append(button);
}
$("prompt").value = EXAMPLES[0][1];
$("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") race.running?.abort(); });
$("stop").addEventListener("click", () => race.running?.abort());
$("key").addEventListener("change", begin);
$("mode").addEventListener("change", setMode);
$("slider").addEventListener("input", () => scrub(Number($("slider").value)));
$("back").addEventListener("click", () => scrub(race.at - 1));
$("on").addEventListener("click", () => scrub(race.at + 1));
$("play").addEventListener("click", () => {
  if (!race.playing && race.at >= length()) show(0);
  play(!race.playing && length() > 0);
});
$("save").addEventListener("click", save);
$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await open($("file").files[0]);
  $("file").value = "";
});
$("theme").addEventListener("click", () =>
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
addEventListener("resize", () => show(race.at));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(race.at));
if (matchMedia("(prefers-reduced-motion: reduce)").matches) $("pace").value = "0";
let theme = null;
try { theme = localStorage.getItem("theme"); } catch { /* none kept */ }
setTheme(THEMES.includes(theme) ? theme : "auto");
setMode();
setLanes([new Lane("WeDLM", "mode verified", true), new Lane("AR", "one token a forward", false)]);
begin();
