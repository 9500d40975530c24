// An MCP server for the tests of openclaw-node: upstream.mjs <folder> [port]
//
// It speaks on stdio, or over HTTP on a port of 127.0.0.1. What it is sent goes to <folder>/log, a line each; over HTTP
// it wants the token that <folder>/token holds, if there is that file.
import { appendFileSync, existsSync, readFileSync } from "node:fs";
import { createServer } from "node:http";
import { createInterface } from "node:readline";

const [folder, port] = process.argv.slice(2);
const object = { type: "object" };
const tools = ["wait", "die", "grow", "environment", "odd"].map((name) => ({ name, inputSchema: object }));
const cancelled = new Set();
const text = (value) => ({ content: [{ type: "text", text: String(value) }] });
const until = async (condition) => {
  while (!condition()) await new Promise((done) => setTimeout(done, 10));
};

async function call(id, { name, arguments: args }, notify) {
  switch (name) {
    case "wait": // until a file of that name is there, or the call is cancelled
      await until(() => cancelled.has(id) || existsSync(`${folder}/${args.file}`));
      return text(cancelled.has(id) ? "cancelled" : "waited");
    case "die":
      process.exit(1);
    case "grow":
      tools.push({ name: args.name, inputSchema: object });
      notify("notifications/tools/list_changed");
      return text("grown");
    case "environment":
      return text(process.env[args.name]);
    case "odd":
      return { content: [], structuredContent: { n: 1e21, text: "\ud83d\ude00" }, isError: true, _meta: { "a/b": 1 } };
    default:
      return text(`the new tool ${name}`);
  }
}

async function answer({ id, method, params }, notify) {
  switch (method) {
    case "initialize":
      return {
        protocolVersion: "2025-11-25",
        serverInfo: { name: "upstream", version: "1" },
        capabilities: { tools: { listChanged: !port } },
        instructions: "Use it gently.",
      };
    case "tools/list": // one a page
      const page = Number(params?.cursor ?? 0);
      return { tools: [tools[page]], nextCursor: page + 1 < tools.length ? String(page + 1) : undefined };
    case "tools/call":
      return call(id, params, notify);
  }
}

async function respond(line, send) {
  appendFileSync(`${folder}/log`, `${line}\n`);
  const message = JSON.parse(line);
  if (message.method === "notifications/cancelled") cancelled.add(message.params.requestId);
  if (message.id === undefined) return;
  const result = await answer(message, (method) => send({ jsonrpc: "2.0", method }));
  const error = { code: -32601, message: `There is no ${message.method}.` };
  send({ jsonrpc: "2.0", id: message.id, ...(result ? { result } : { error }) });
}

if (port) {
  const server = createServer(async (request, response) => {
    const token = existsSync(`${folder}/token`) && readFileSync(`${folder}/token`, "utf8");
    if (token && request.headers.authorization !== `Bearer ${token}`) return response.writeHead(401).end();
    if (request.method !== "POST") return response.end("hello");
    let body = "";
    for await (const chunk of request) body += chunk;
    await respond(body, (message) => response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(message)));
    if (!response.writableEnded) response.writeHead(204).end();
  });
  server.listen(Number(port), "127.0.0.1", () => console.log(server.address().port));
} else {
  createInterface({ input: process.stdin })
    .on("line", (line) => respond(line, (message) => process.stdout.write(`${JSON.stringify(message)}\n`)))
    .on("close", () => process.exit());
}
