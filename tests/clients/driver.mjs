// What the JavaScript drivers share: reads the plan in argv, runs its steps on one connection, prints the report.
//
// A driver calls run(client, version, connect). connect(plan) resolves to { connected, list, call, close }:
// list() gives the tools, call(name, args, signal) the result; both throw what the client's user would see.
// startMs, for a client that starts anew for each call, is how long that takes; abort(name, args, afterMs) is for one
// that cannot take a signal.

import { spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

export const clientsDir = resolve(process.env.OCP_CLIENTS_DIR ?? join(import.meta.dirname, '../../target/clients'));

// Loads a module of the npm package that install.sh put into the folder of `client`.
export const load = (client, module) => createRequire(join(clientsDir, client, 'package.json'))(module);

export const packageFile = (client, pkg, file) => join(clientsDir, client, 'node_modules', pkg, file);

export const packageVersion = (client, pkg) =>
  JSON.parse(readFileSync(packageFile(client, pkg, 'package.json'), 'utf8')).version;

export const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

export const timeout = (plan) => plan.timeout_ms ?? 30_000;

// A folder that goes away with the driver, for the home and the configuration of a client.
export function scratchDir() {
  const dir = mkdtempSync(join(tmpdir(), 'ocp-client-'));
  process.on('exit', () => rmSync(dir, { recursive: true, force: true }));
  return dir;
}

// Runs a command-line client once. Aborting is what its user would do: Ctrl-C.
export function cli(args, { env, cwd, signal, limitMs }) {
  return new Promise((done, fail) => {
    const child = spawn(process.execPath, args, { env: { ...process.env, ...env }, cwd, stdio: ['ignore', 'pipe', 'pipe'] });
    const out = { stdout: '', stderr: '', code: null };
    child.stdout.on('data', (data) => (out.stdout += data));
    child.stderr.on('data', (data) => ((out.stderr += data), process.stderr.write(data)));
    const limit = setTimeout(() => child.kill('SIGKILL'), limitMs);
    signal?.addEventListener('abort', () => child.kill('SIGINT'));
    child.on('error', fail);
    child.on('close', (code, killedBy) => {
      clearTimeout(limit);
      if (signal?.aborted) fail(signal.reason);
      else if (killedBy) fail(new Error(`the client did not finish within ${limitMs} ms`));
      else done({ ...out, code });
    });
  });
}

const failure = (error) => ({
  error: String(error?.message ?? error),
  code: error?.code,
  status: error?.status,
  cause: error?.cause?.message,
});

async function step(client, [kind, ...rest]) {
  switch (kind) {
    case 'list':
      return client.list();
    case 'call':
      return client.call(rest[0], rest[1] ?? {});
    case 'abort': {
      const [name, args, afterMs] = rest;
      if (client.abort) return client.abort(name, args, afterMs);
      const controller = new AbortController();
      const timer = setTimeout(() => controller.abort(new Error('aborted by the user')), afterMs + (client.startMs ?? 0));
      return client.call(name, args, controller.signal).finally(() => clearTimeout(timer));
    }
    case 'parallel':
      return Promise.all(rest[0].map(([name, args]) => client.call(name, args ?? {}).catch(failure)));
    case 'sleep':
      return sleep(rest[0]).then(() => null);
    case 'touch_file':
      return writeFileSync(rest[0], '') ?? null;
    case 'wait_file':
      for (const end = Date.now() + 30_000; !existsSync(rest[0]); await sleep(20))
        if (Date.now() > end) throw new Error(`${rest[0]} did not appear within 30 s`);
      return null;
    default:
      throw new Error(`unknown step '${kind}'`);
  }
}

export async function run(client, version, connect) {
  console.log = console.info = console.debug = console.warn = console.error; // stdout is for the report alone
  const finish = (report, code) => {
    process.stdout.write(JSON.stringify({ client, version, ...report }) + '\n');
    process.exit(code);
  };
  const plan = JSON.parse(process.argv[2]);
  let connection;
  try {
    connection = await connect(plan);
  } catch (error) {
    const { error: connect_error, ...rest } = failure(error);
    finish({ connect_error, ...rest }, 3);
  }
  const steps = [];
  for (const one of plan.steps ?? []) {
    try {
      steps.push({ ok: await step(connection, one) });
    } catch (error) {
      steps.push(failure(error));
    }
  }
  await Promise.race([Promise.resolve(connection.close?.()).catch(console.error), sleep(5_000)]);
  const { protocol_version = null, server_info = null, instructions = null } = connection.connected ?? {};
  finish({ connected: { protocol_version, server_info, instructions }, steps }, 0);
}
