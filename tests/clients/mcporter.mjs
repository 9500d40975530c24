// mcporter's command line, one process per step: node mcporter.mjs '<plan JSON>', see README.md
//
// It never tells what the server said about itself. Only its "raw" output has the whole result: a JavaScript literal,
// whole down to eight levels and a hundred items of a list.

import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { runInNewContext } from 'node:vm';
import { cli, packageFile, packageVersion, run, scratchDir, timeout } from './driver.mjs';

const program = packageFile('mcporter', 'mcporter', 'dist/cli.js');

await run('mcporter', packageVersion('mcporter', 'mcporter'), async (plan) => {
  const home = scratchDir();
  const config = join(home, 'mcporter.json');
  const server = plan.url
    ? { baseUrl: plan.url, headers: plan.headers }
    : { command: plan.command, args: plan.args, env: plan.env };
  writeFileSync(config, JSON.stringify({ mcpServers: { s: server }, imports: [] }));

  const mcporter = async (args, timeoutMs) => {
    const all = [program, '--config', config, ...args, '--no-oauth', '--timeout', String(timeoutMs)];
    const out = await cli(all, { env: { HOME: home }, cwd: home, limitMs: timeoutMs + 10_000 });
    if (!out.stdout.trim()) throw new Error(out.stderr.trim() || `exit code ${out.code}`);
    const printed = runInNewContext(`(${out.stdout})`);
    if (out.code !== 0 && printed.issue)
      throw Object.assign(new Error(printed.issue.rawMessage), { status: printed.issue.statusCode });
    return printed;
  };
  const list = async () => (await mcporter(['list', 's', '--schema', '--json'], timeout(plan))).tools;
  const call = (name, args, timeoutMs = timeout(plan)) =>
    // Not `s.${name}`: a tool's name may hold a dot itself.
    mcporter(['call', '--server', 's', '--tool', name, '--args', JSON.stringify(args), '--output', 'raw'], timeoutMs);

  await list();
  return {
    // Without the options for its own command line that mcporter adds to each tool.
    list: async () => (await list()).map(({ options, ...tool }) => tool),
    call: (name, args) => call(name, args),
    // Its user cannot cancel; a shorter timeout is what drops a call.
    abort: (name, args, afterMs) => call(name, args, afterMs),
  };
});
