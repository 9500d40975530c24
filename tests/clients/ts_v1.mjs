// The TypeScript SDK v1 (@modelcontextprotocol/sdk), legacy versions only: node ts_v1.mjs '<plan JSON>', see README.md

import { load, packageVersion, run, timeout } from './driver.mjs';

const sdk = (file) => load('ts-v1', `@modelcontextprotocol/sdk/client/${file}`);
const { Client } = sdk('index.js');
const { StreamableHTTPClientTransport } = sdk('streamableHttp.js');
const { StdioClientTransport } = sdk('stdio.js');

await run('ts-v1', packageVersion('ts-v1', '@modelcontextprotocol/sdk'), async (plan) => {
  const client = new Client({ name: 'ocp-test-ts-v1', version: '1.0.0' });
  client.onerror = (error) => console.error('onerror:', error.message);
  const transport = plan.url
    ? new StreamableHTTPClientTransport(new URL(plan.url), { requestInit: { headers: plan.headers } })
    : new StdioClientTransport({ command: plan.command, args: plan.args, env: plan.env });
  // The client tells the negotiated version to its transport only.
  let protocolVersion;
  const setProtocolVersion = transport.setProtocolVersion?.bind(transport);
  transport.setProtocolVersion = (version) => ((protocolVersion = version), setProtocolVersion?.(version));

  await client.connect(transport, { timeout: timeout(plan) });
  return {
    connected: {
      protocol_version: protocolVersion,
      server_info: client.getServerVersion(),
      instructions: client.getInstructions(),
    },
    list: async () => (await client.listTools(undefined, { timeout: timeout(plan) })).tools,
    call: (name, args, signal) =>
      client.callTool({ name, arguments: args }, undefined, { timeout: timeout(plan), signal }),
    close: () => client.close(),
  };
});
