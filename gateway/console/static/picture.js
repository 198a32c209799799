// The picture of the fleet that the page puts together from the gateway's events, and what happens in it.

const MAX_EVENTS = 200;
const SETTLE_MS = 2000; // within which a gateway that nobody has looked at gets to know its fleet: these workers have not joined now

export class Picture {
  constructor() {
    this.workers = new Map();
    this.routers = [];
    this.queues = [];
    this.events = []; // the latest first
    this.problem = "";
    this.at = this.firstAt = 0;
    this.seq = -1;
    this.fields = [];
  }

  /** Applies an event; returns false if one before it is missing. */
  apply(event) {
    if (!event.whole && event.seq !== this.seq + 1) return false;
    if (this.seq < 0) this.firstAt = event.at_ms;
    const isFirst = this.seq < 0 || (!this.workers.size && event.at_ms - this.firstAt < SETTLE_MS);
    this.seq = event.seq;
    this.at = event.at_ms;
    this.problem = event.problem;
    const before = new Map(this.workers);
    if (event.whole) {
      this.fields = event.fields;
      this.workers = new Map();
    }
    for (const sheet of event.joined) {
      const known = this.workers.get(sheet.number) || before.get(sheet.number);
      this.workers.set(sheet.number, {role: "both", site: "", ...(known || {}), ...sheet});
    }
    for (const row of event.workers) {
      const worker = this.workers.get(row[0]);
      if (worker) this.fields.forEach((name, at) => { worker[name] = row[at]; });
    }
    for (const [number, front_mib, engine_mib, engine_since_s, devices] of event.memory) {
      const worker = this.workers.get(number);
      if (worker) Object.assign(worker, {memory: {front_mib, engine_mib, engine_since_s, devices}});
    }
    for (const number of event.left) this.workers.delete(number);
    this.takeEvents(isFirst, before, event);
    this.takeRouters(isFirst, event.routers);
    this.queues = event.queues;
    for (const worker of this.workers.values()) worker.shown = {state: worker.state, fetched: worker.fetched_blocks};
    return true;
  }

  takeEvents(isFirst, before, event) {
    if (isFirst) return;
    for (const [number, worker] of this.workers) {
      const known = before.get(number);
      if (!known) this.tell(`${name(worker)} joined, ${worker.state}`);
      else if (known.shown && known.shown.state !== worker.state) {
        this.tell(`${name(worker)} is ${worker.state} (was ${known.shown.state})`);
      }
      const fetched = known && known.shown ? worker.fetched_blocks - known.shown.fetched : 0;
      if (fetched > 0) this.tell(`${name(worker)} fetched ${fetched} KV blocks from other workers`);
    }
    for (const [number, worker] of before) {
      if (!this.workers.has(number)) this.tell(`${name(worker)} is gone`);
    }
  }

  takeRouters(isFirst, routers) {
    const before = new Map(this.routers.map((router) => [router.router_id, router]));
    const after = new Set(routers.map((router) => router.router_id));
    if (!isFirst) {
      for (const router of routers) {
        const known = before.get(router.router_id);
        if (!known) this.tell(`router ${router.router_id} appeared`);
        else {
          const continued = router.continued - known.continued;
          if (continued > 0) this.tell(`${continued} requests continue at other workers (router ${router.router_id})`);
          const refused = new Set(known.refused_cards.map((card) => card.worker_id));
          for (const card of router.refused_cards) {
            if (!refused.has(card.worker_id)) this.tell(`${card.worker_id} of ${card.model} was refused: ${card.reason}`);
          }
        }
      }
      for (const id of before.keys()) if (!after.has(id)) this.tell(`router ${id} is gone`);
    }
    this.routers = routers;
  }

  tell(text) {
    this.events.unshift({at: this.at, text});
    this.events.length = Math.min(this.events.length, MAX_EVENTS);
  }

  /** The models, each with its workers counted and its speed, by which a slow worker is known. */
  models() {
    const found = new Map();
    const queues = new Map(this.queues.map(([model, waiting, held, progress]) => [model, {waiting, held, progress}]));
    const of = (model) => {
      if (!found.has(model)) {
        found.set(model, {model, states: new Map(), running: 0, waiting: 0, tokens_per_s: 0, token_ms: [], queued: 0,
          used_blocks: 0, total_blocks: 0, held: 0, progress: null});
      }
      return found.get(model);
    };
    for (const worker of this.workers.values()) {
      const model = of(worker.model);
      model.states.set(worker.state, (model.states.get(worker.state) || 0) + 1);
      model.running += worker.running;
      model.waiting += worker.waiting;
      model.tokens_per_s += worker.tokens_per_s;
      model.used_blocks += worker.used_blocks;
      model.total_blocks += worker.total_blocks;
      if (worker.token_ms) model.token_ms.push(worker.token_ms);
    }
    for (const [model, queue] of queues) {
      Object.assign(of(model), {queued: queue.waiting, held: queue.held, progress: queue.progress});
    }
    for (const model of found.values()) model.token_ms = median(model.token_ms);
    return [...found.values()].sort((one, other) => (one.model < other.model ? -1 : 1));
  }
}

function name(worker) {
  return `${worker.worker_id} of ${worker.model}`;
}

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : 0;
}
