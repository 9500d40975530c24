// The TypeScript SDK v2 (@modelcontextprotocol/client): node ts_v2.mjs '<plan JSON>', see README.md
//
// Without a mode it does what the SDK does by default, the legacy handshake.

import { load, packageVersion, run, timeout } from './driver.mjs';

const { Client, StreamableHTTPClientTransport } = load('ts-v2', '@modelcontextprotocol/client');
const { StdioClientTransport } = load('ts-v2', '@modelcontextprotocol/client/stdio');

const modes = { legacy: 'legacy', auto: 'auto', modern: { pin: '2026-07-28' } };

await run('ts-v2', packageVersion('ts-v2', '@modelcontextprotocol/client'), async (plan) => {
  const versionNegotiation = plan.mode && { mode: modes[plan.mode] };
  const client = new Client({ name: 'ocp-test-ts-v2', version: '1.0.0' }, { versionNegotiation });
  client.onerror = (error) => console.error('onerror:', error.message);
  const transport = plan.url
    ? new StreamableHTTPClientTransport(new URL(plan.url), { requestInit: { headers: plan.headers } })
    : new StdioClientTransport({ command: plan.command, args: plan.args, env: plan.env });

  await client.connect(transport, { timeout: timeout(plan) });
  return {
    connected: {
      protocol_version: client.getNegotiatedProtocolVersion(),
      server_info: client.getServerVersion(),
      instructions: client.getInstructions(),
    },
    list: async () => (await client.listTools(undefined, { timeout: timeout(plan) })).tools,
    call: (name, args, signal) => client.callTool({ name, arguments: args }, { timeout: timeout(plan), signal }),
    close: () => client.close(),
  };
});
