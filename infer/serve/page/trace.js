// Traces as infer/trace.py describes them: kept while they come, saved, opened.

const FORMAT = "wedlm-trace", VERSION = 1;
const PALE = 2; // nats; what is less certain looks no paler

class Trace {
  constructor(known = {}) {
    this.data = {...known, tokens: {}, forwards: []};
    this.totals = [{tokens: 0, text: ""}]; // before each forward
    this.finished = false;
  }

  static of(data) {
    const {tokens, forwards, ...known} = data;
    const trace = new Trace(known);
    trace.add({tokens, forwards});
    trace.finished = true;
    return trace;
  }

  // Takes in the news of a stream.
  add({tokens, forwards, ...known}) {
    Object.assign(this.data, known);
    Object.assign(this.data.tokens, tokens);
    for (const forward of forwards) {
      const {tokens: count, text} = this.totals.at(-1);
      this.data.forwards.push(forward);
      const added = forward.text ?? forward.committed.map((id) => this.text(id)).join("");
      this.totals.push({tokens: count + forward.committed.length, text: text + added});
    }
  }

  get length() { return this.data.forwards.length; }
  get ids() { return this.data.forwards.flatMap((forward) => forward.committed); }
  // Special tokens have no text; those that a model writes end it.
  text(id) { return this.data.tokens[id] || (this.data.tokens[id] === "" ? "end" : `#${id}`); }

  // The counters after so many forwards.
  figures(count) {
    const {tokens} = this.totals[count];
    if (!count) return {tokens, forwards: 0};
    const {num_forwards: forwards, num_token_instances: instances, seconds} =
      this.data.forwards[count - 1];
    return {
      tokens, forwards, speed: tokens / seconds,
      rate: tokens / forwards, cached: tokens / instances,
    };
  }

  // What forward `index` made of each slot: its kind, what stands in it, and its entropy.
  slots(index) {
    const forward = this.data.forwards[index];
    const [before, after] = [this.totals[index].tokens, this.totals[index + 1].tokens];
    const filled = new Map(forward.filled), early = new Set(forward.out_of_order);
    const rejected = new Set(forward.rejected);
    const show = Math.max(forward.slots.length, after - forward.start);
    return Array.from({length: show}, (_, slot) => slot).flatMap((slot) => {
      const place = forward.start + slot, id = forward.slots[slot] ?? null;
      const entropy = forward.entropies[slot] ?? null;
      const cell = (kind, text) => ({kind, text, entropy, place, early: early.has(slot)});
      if (place >= before && place < after) {
        const commit = cell("commit", this.text(forward.committed[place - before]));
        return rejected.has(slot) ? [cell("reject", this.text(id)), commit] : commit;
      }
      if (place < before) return cell("text", this.text(id));
      if (rejected.has(slot)) return cell("reject", this.text(id));
      if (filled.has(slot)) return cell("fill", this.text(filled.get(slot)));
      return id === null ? cell("mask", "·") : cell("held", this.text(id));
    });
  }
}

// 1 where the model is certain, 0 where it is not at all.
// The root spreads the small entropies apart, which most are.
const sureness = (entropy) =>
  entropy === null ? 0.5 : 1 - Math.sqrt(Math.min(entropy, PALE) / PALE);

const asFile = (traces) => JSON.stringify(
  {format: FORMAT, version: VERSION, sequences: traces.map((trace) => trace.data)});

// Returns the traces of a file's text; throws an Error that says what is wrong with it.
function fromFile(text) {
  let whole;
  try {
    whole = JSON.parse(text);
  } catch {
    throw new Error("this file is no JSON");
  }
  if (whole?.format !== FORMAT) throw new Error(`this file is no trace: its format is not ${FORMAT}`);
  if (whole.version !== VERSION) throw new Error(`version ${whole.version}; this page reads ${VERSION}`);
  try {
    const traces = whole.sequences.map(Trace.of);
    if (!traces.length) throw new Error();
    traces.forEach((trace) => trace.data.forwards.forEach((_, index) => trace.slots(index)));
    return traces;
  } catch {
    throw new Error("this trace is damaged");
  }
}
