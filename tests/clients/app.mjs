// An app that lends one tool, in Node 22 or later, or in a web page that the proxy allows (ALLOWED_ORIGINS).
const env = globalThis.process?.env ?? {};
const proxy = env.OPENCLAW_PROXY_SERVER_URL ?? "http://127.0.0.1:8000";
const token = env.OPENCLAW_PROXY_APP_TOKEN ?? "";
const number = { type: "number" };
const schema = { type: "object", properties: { a: number, b: number }, required: ["a", "b"] };
const tools = { add: ({ a, b }) => ({ sum: a + b }) };

const response = await fetch(`${proxy}/v1/chat/sessions`, {
  method: "POST",
  headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
  body: JSON.stringify({ device_id: "my-browser", tools: [{ name: "add", description: "Add two numbers.", input_schema: schema }] }),
});
if (!response.ok) throw new Error(await response.text());
const session = await response.json();
console.log(session.mcp_url);

// A browser cannot set headers on a WebSocket, so the token travels as a subprotocol.
const bearer = btoa(token).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
const bridge = new WebSocket(session.bridge_url, token ? ["openclaw-bridge", `bearer.${bearer}`] : []);
bridge.onmessage = async ({ data }) => {
  const { type, mcpSessionId, request_id, tool_name, arguments: args } = JSON.parse(data);
  if (type === "ping") bridge.send('{"type":"pong"}');
  if (type !== "invoke_tool") return;
  const answer = { type: "invoke_result", mcpSessionId, request_id };
  try {
    Object.assign(answer, { ok: true, content: await tools[tool_name](args) });
  } catch (error) {
    Object.assign(answer, { ok: false, error: String(error) });
  }
  bridge.send(JSON.stringify(answer));
};
