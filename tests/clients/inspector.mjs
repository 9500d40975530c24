// The MCP Inspector's command line, one process per step: node inspector.mjs '<plan JSON>', see README.md
//
// It lists the tools before each call, so a name that is not in the list never reaches the server.

import { cli, packageFile, packageVersion, run, scratchDir, timeout } from './driver.mjs';

const inspector = '@modelcontextprotocol/inspector';
const launcher = packageFile('inspector', inspector, 'clients/launcher/build/index.js');

await run('inspector', packageVersion('inspector', inspector), async (plan) => {
  const home = scratchDir();
  const server = ['--connect-timeout', String(timeout(plan)), '--protocol-era', plan.mode ?? 'legacy'];
  if (plan.url) {
    server.push('--transport', 'http', '--server-url', plan.url);
    for (const [name, value] of Object.entries(plan.headers ?? {})) server.push('--header', `${name}: ${value}`);
  }
  for (const [name, value] of Object.entries(plan.env ?? {})) server.push('-e', `${name}=${value}`);
  const target = plan.command ? ['--', plan.command, ...(plan.args ?? [])] : [];

  const inspect = async (method, args = [], signal) => {
    const all = [launcher, '--cli', '--format', 'json', '--stored-auth-only', '--method', method, ...args, ...server, ...target];
    const out = await cli(all, { env: { HOME: home }, cwd: home, signal, limitMs: timeout(plan) + 5_000 });
    // A result with isError is printed like any other; only then the exit code says that the tool failed.
    if (out.stdout.trim()) return JSON.parse(out.stdout).result;
    const line = out.stderr.split('\n').findLast((text) => text.startsWith('{"error"'));
    const error = line ? JSON.parse(line).error : { code: `exit code ${out.code}`, message: out.stderr.trim() };
    throw Object.assign(new Error(error.message), { code: error.code, status: error.status });
  };

  const before = Date.now();
  const { protocolVersion, serverInfo, instructions } = await inspect('initialize');
  return {
    connected: { protocol_version: protocolVersion, server_info: serverInfo, instructions },
    startMs: Date.now() - before,
    list: async () => (await inspect('tools/list')).tools,
    call: (name, args, signal) =>
      inspect('tools/call', ['--tool-name', name, '--tool-args-json', JSON.stringify(args)], signal),
  };
});
