// An app that lends tools and copes with what networks do, in Node 22 or later, or in a web page that the proxy allows.
//
// Its calls outlive a dropped socket, run at most once, tell how far they are, and stop when nobody wants them any more.
// An app that is started again goes on with the session that it had: node resuming_app.mjs <its bridge URL>
// A page sets globalThis.settings = { OPENCLAW_PROXY_SERVER_URL, OPENCLAW_PROXY_APP_TOKEN } first.
const settings = globalThis.process?.env ?? globalThis.settings ?? {};
const proxy = settings.OPENCLAW_PROXY_SERVER_URL ?? "http://127.0.0.1:8000";
const token = settings.OPENCLAW_PROXY_APP_TOKEN ?? "";
const [shortest, longest] = [500, 30_000]; // What bounds the pause before it connects again, in milliseconds.
const silence = 45_000; // After so long without a frame, more than two pings of the proxy, a socket is dead.
const kept = 256; // The most results it keeps: the proxy has no more calls under way, so older ones have arrived.

const schema = (properties) => ({ type: "object", properties, required: Object.keys(properties) });
const tools = [
  { name: "add", description: "Add two numbers.", input_schema: schema({ a: { type: "number" }, b: { type: "number" } }) },
  { name: "sleep", description: "Wait, and tell how far it is.", input_schema: schema({ ms: { type: "integer" } }) },
];
const work = {
  add: ({ a, b }) => ({ sum: a + b }),
  async sleep({ ms }, signal, progress) {
    for (let step = 0; step < 10; step++) {
      progress(step, 10);
      await wait(ms / 10, signal);
    }
    return { slept_ms: ms };
  },
};
const wait = (ms, signal) =>
  new Promise((resolve, reject) => {
    setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => reject(signal.reason));
  });

const running = new Map(); // request_id: what stops the work on the call
const results = new Map(); // request_id: its invoke_result, until a hello shows that the proxy has it
let knows_all = false; // Whether no earlier process of this app can have run a call.
let socket;

async function register() {
  const response = await fetch(`${proxy}/v1/chat/sessions`, {
    method: "POST",
    headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
    body: JSON.stringify({ device_id: "my-browser", tools, bridge_features: ["resume", "cancel", "deadline", "progress"] }),
    signal: AbortSignal.timeout(30_000),
  });
  if (!response.ok) throw Object.assign(new Error(await response.text()), { code: response.status });
  const session = await response.json();
  console.log(session.mcp_url);
  return session.bridge_url;
}

const message = (type, request_id, members) =>
  JSON.stringify({ type, mcpSessionId: request_id.split(":")[0], request_id, ...members });
// What is lost here is asked for in the next hello.
const send = (text) => socket.readyState === WebSocket.OPEN && socket.send(text);

// Of all calls that earlier sockets carried, the proxy still wants those that are pending.
function settle(pending) {
  for (const request_id of running.keys()) if (!pending.includes(request_id)) cancel(request_id);
  for (const request_id of results.keys()) if (!pending.includes(request_id)) results.delete(request_id);
  for (const request_id of pending.filter((request_id) => !running.has(request_id))) {
    if (!results.has(request_id) && !knows_all)
      results.set(request_id, message("invoke_result", request_id, { ok: false, error: "The tool may have run." }));
    const never_seen = message("invoke_result", request_id, { ok: false, error: { code: "unknown_request" } });
    send(results.get(request_id) ?? never_seen);
  }
  knows_all = true;
}

async function run({ request_id, tool_name, arguments: args, timeout_ms, progress: is_wanted }) {
  const stop = new AbortController();
  running.set(request_id, stop);
  const signal = AbortSignal.any([stop.signal, AbortSignal.timeout(timeout_ms)]);
  const progress = (done, total) => is_wanted && send(message("tool_progress", request_id, { progress: done, total }));
  let result;
  try {
    result = message("invoke_result", request_id, { ok: true, content: await work[tool_name](args, signal, progress) });
  } catch (error) {
    result = message("invoke_result", request_id, { ok: false, error: String(error) });
  }
  if (!running.delete(request_id)) return; // It was cancelled.
  results.set(request_id, result);
  if (results.size > kept) results.delete(results.keys().next().value);
  send(result);
}

function cancel(request_id) {
  running.get(request_id)?.abort();
  running.delete(request_id);
}

function receive(frame) {
  if (frame.type === "ping") send('{"type":"pong"}');
  if (frame.type === "hello") settle(frame.pending);
  if (frame.type === "invoke_tool" && !running.has(frame.request_id) && !results.has(frame.request_id)) run(frame);
  if (frame.type === "cancel_tool") cancel(frame.request_id);
}

// Serves calls until the socket goes, and gives the code and the reason.
const lend = (bridge_url) =>
  new Promise((resolve) => {
    // A browser cannot set headers on a WebSocket, so the token travels as a subprotocol.
    const bearer = btoa(token).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
    socket = new WebSocket(bridge_url, token ? ["openclaw-bridge", `bearer.${bearer}`] : []);
    const end = ({ code, reason }) => {
      clearTimeout(watchdog);
      socket.onmessage = socket.onclose = socket.onerror = null;
      socket.close();
      resolve({ code, reason });
    };
    const watch = () => setTimeout(end, silence, {});
    let watchdog = watch();
    socket.onclose = socket.onerror = end; // Node tells of a connection that failed by an error alone.
    socket.onmessage = ({ data }) => {
      clearTimeout(watchdog);
      watchdog = watch();
      receive(JSON.parse(data));
    };
  });

async function main(bridge_url) {
  for (let bound = shortest; ; bound = Math.min(2 * bound, longest)) {
    const began = Date.now();
    let end;
    try {
      bridge_url ??= await register();
      end = await lend(bridge_url);
    } catch (error) {
      end = { code: error.code, reason: error.message };
    }
    // Not let in; deleted; the token is wrong; another one is connected.
    if ([401, 403, 422, 1000, 4401, 4409].includes(end.code)) return end.reason;
    if (end.code === 4404) bridge_url = undefined;
    if (Date.now() - began > longest) bound = shortest;
    // The pause is random, so that the apps of a proxy that restarts do not all come at once.
    const pause = Math.random() * bound;
    console.error(`Not connected: ${end.reason || "no answer"}; again in ${Math.round(pause)} ms`);
    await wait(pause);
  }
}

console.error(await main(globalThis.process?.argv[2]));
globalThis.process?.exit(1);
