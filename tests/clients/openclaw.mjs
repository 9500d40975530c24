// OpenClaw's own MCP runtime, without a model or an account: node openclaw.mjs '<plan JSON>', see README.md
//
// It needs Node 24 and install.sh --heavy. Tools have the names that the model would see: "s__" before each name.
// $OC_DIST, the dist folder of another openclaw package, is used in place of the installed one.

import { join } from 'node:path';
import { packageFile, packageVersion, run, scratchDir, timeout } from './driver.mjs';

const dist = process.env.OC_DIST ?? packageFile('openclaw', 'openclaw', 'dist');
process.env.HOME = process.env.OPENCLAW_STATE_DIR = scratchDir();
process.chdir(process.env.HOME);

await run('openclaw', packageVersion('openclaw', 'openclaw'), async (plan) => {
  const { createSessionMcpRuntime } = await import(join(dist, 'agents/agent-bundle-mcp-runtime.js'));
  const { materializeBundleMcpToolsForRun } = await import(join(dist, 'agents/agent-bundle-mcp-materialize.js'));
  const server = plan.url
    ? { url: plan.url, transport: 'streamable-http', headers: plan.headers }
    : { command: plan.command, args: plan.args, env: plan.env };
  const runtime = createSessionMcpRuntime({
    sessionId: 'test',
    workspaceDir: process.cwd(),
    cfg: { mcp: { servers: { s: { ...server, requestTimeoutMs: timeout(plan) } } } },
    manifestRegistry: { plugins: [] },
  });

  const materialize = async () => {
    const { tools, diagnostics } = await materializeBundleMcpToolsForRun({ runtime });
    if (tools.length === 0) throw new Error(diagnostics?.map((one) => one.message).join('; ') || 'no tools');
    return tools;
  };
  let calls = 0;
  await materialize();
  return {
    list: async () =>
      (await materialize()).map((tool) => ({ name: tool.name, description: tool.description, inputSchema: tool.parameters })),
    call: async (name, args, signal) => {
      // The model sees a dash for what providers do not take in a name.
      const shown = `s__${name.replace(/[^A-Za-z0-9_-]/g, '-')}`;
      const tool = (await materialize()).find((one) => one.name === name || one.name === shown);
      if (!tool) throw new Error(`OpenClaw shows no tool '${name}'`);
      const result = await tool.execute(`call-${++calls}`, args, signal);
      // OpenClaw keeps what the tool said of isError in its own words.
      return result.details?.status === 'error' ? { ...result, isError: true } : result;
    },
    close: () => runtime.dispose(),
  };
});
