// The conformance suite's client under test: the TypeScript SDK v2 on stdio, with openclaw-mcp-stdio in between.
//
//   conformance client --command "<node> stdio-conformance-driver.mjs <openclaw-mcp-stdio>" --scenario <name>
//
// The suite appends the URL of its mock server and names the protocol version in the environment. The client does
// what any scenario may look at: it lists whatever the server offers and uses each of it once.

import { load } from './driver.mjs';

const { Client } = load('ts-v2', '@modelcontextprotocol/client');
const { StdioClientTransport } = load('ts-v2', '@modelcontextprotocol/client/stdio');

const [command, url] = process.argv.slice(2);
if (!url) {
  console.error('usage: stdio-conformance-driver.mjs <openclaw-mcp-stdio> <url>');
  process.exit(2);
}
const isModern = process.env.MCP_CONFORMANCE_PROTOCOL_VERSION === '2026-07-28';
const context = JSON.parse(process.env.MCP_CONFORMANCE_CONTEXT ?? '{}');

const client = new Client(
  { name: 'ocp-stdio-conformance', version: '1.0.0' },
  { capabilities: { elicitation: {} }, versionNegotiation: { mode: isModern ? 'auto' : 'legacy' } },
);
client.onerror = (error) => console.error('onerror:', error.message);
client.setRequestHandler('elicitation/create', async () => ({ action: 'accept', content: { confirmed: true } }));
await client.connect(new StdioClientTransport({ command, args: ['--url', url], stderr: 'inherit' }));

// A value that fits a property's schema.
const samples = { string: 'x', integer: 1, number: 1, boolean: true, object: {}, array: [], null: null };
const example = ({ properties = {} }) =>
  Object.fromEntries(Object.entries(properties).map(([name, { type = 'string' }]) => [name, samples[type]]));

// Some mock servers refuse what they list. What counts is what they saw, so the suite judges and not this client.
const use = (what, action) =>
  action().then(
    (result) => console.error(what, JSON.stringify(result)),
    (error) => console.error(what, 'failed:', error.message),
  );

const offers = client.getServerCapabilities() ?? {};
// Mock servers answer tools/list whether they announce tools or not.
const { tools } = await client.listTools();
// This tool wants to see the schema that arrived for the other one.
const schema = tools.find(({ name }) => name === 'json_schema_2020_12_tool')?.inputSchema;
const argumentsOf = (tool) => (tool.name === 'json_schema_echo' ? { schema } : example(tool.inputSchema));
const calls = context.toolCalls ?? tools.map((tool) => ({ name: tool.name, arguments: argumentsOf(tool) }));
await Promise.all(calls.map((call) => use(`tools/call ${call.name}`, () => client.callTool(call))));
if (offers.resources) {
  const { resources } = await client.listResources();
  for (const { uri } of resources) await use(`resources/read ${uri}`, () => client.readResource({ uri }));
}
if (offers.prompts) {
  const { prompts } = await client.listPrompts();
  for (const { name } of prompts) await use(`prompts/get ${name}`, () => client.getPrompt({ name }));
}
await client.close();
