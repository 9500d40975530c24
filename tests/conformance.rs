//! MCP's official conformance suite, through the bridge: its tools are lent by a small app of its own. And the
//! suite's scenarios for clients, with `openclaw-mcp-stdio` as the client.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::clients::{NODE, clients_dir};
use crate::support::{TestServer, soon};

/// How long one revision may take; it takes some seconds.
const SUITE_PATIENCE: Duration = Duration::from_secs(170);

async fn run(spec: &str, settings: &[(&str, &str)]) {
    // The suite can send no token, and its calls are checked for a Host that is loopback.
    let server = TestServer::start(settings).await;
    let python = clients_dir().join("py-mcp2/bin/python");
    assert!(python.exists(), "{} is missing: run tests/run, which installs it", python.display());
    let mut app = Command::new(python)
        .args(["tests/clients/conformance_app.py", "--base-url", &server.base])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(app.stdout.take().unwrap()).lines();
    let ready = soon(lines.next_line()).await.unwrap().expect("the app says that it is ready");
    let ready: Value = serde_json::from_str(&ready).unwrap();
    let suite = Command::new("tests/clients/conformance.sh")
        .args([ready["mcp_url"].as_str().unwrap(), spec])
        .env("OCP_CLIENTS_DIR", clients_dir())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(SUITE_PATIENCE, suite).await.expect("the suite hangs").unwrap();
    let tail: Vec<_> = String::from_utf8_lossy(&output.stdout).lines().rev().take(60).map(str::to_owned).collect();
    let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
    assert!(output.status.success(), "{spec}:\n{tail}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn the_suite_passes_for_2025_06_18() {
    run("2025-06-18", &[]).await;
}

#[tokio::test]
async fn the_suite_passes_for_2025_11_25() {
    run("2025-11-25", &[]).await;
}

#[tokio::test]
async fn the_suite_passes_for_2026_07_28() {
    run("2026-07-28", &[]).await;
}

/// The scenarios that concern a client of tools, with the revisions that they are run for.
const CLIENT_SCENARIOS: [(&str, &[&str]); 9] = [
    ("initialize", &["2025-06-18", "2025-11-25"]),
    ("tools_call", &["2025-06-18", "2025-11-25", "2026-07-28"]),
    ("json-schema-2020-12-preservation", &["2025-11-25", "2026-07-28"]),
    ("json-schema-ref-no-deref", &["2026-07-28"]),
    ("request-metadata", &["2026-07-28"]),
    ("http-standard-headers", &["2026-07-28"]),
    ("http-custom-headers", &["2026-07-28"]),
    ("http-invalid-tool-headers", &["2026-07-28"]),
    ("sep-2322-client-request-state", &["2026-07-28"]),
];

#[tokio::test]
async fn the_stdio_program_passes_the_scenarios_for_clients() {
    let node = clients_dir().join(NODE);
    assert!(node.exists(), "{} is missing: run tests/run, which installs it", node.display());
    let suite = clients_dir().join("conformance/node_modules/@modelcontextprotocol/conformance/dist/index.js");
    let driver = std::path::absolute("tests/clients/stdio-conformance-driver.mjs").unwrap();
    let shim = env!("CARGO_BIN_EXE_openclaw-mcp-stdio");
    for (scenario, revisions) in CLIENT_SCENARIOS {
        for revision in revisions {
            let command = format!("{} {} {shim}", node.display(), driver.display());
            let run = Command::new(&node)
                .arg(&suite)
                .args(["client", "--scenario", scenario, "--spec-version", revision, "--command", &command])
                .current_dir(env!("CARGO_TARGET_TMPDIR"))
                .env("OCP_CLIENTS_DIR", clients_dir())
                .kill_on_drop(true)
                .output();
            let output = tokio::time::timeout(SUITE_PATIENCE, run).await.expect("the suite hangs").unwrap();
            let stdout = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success(),
                "{scenario} {revision}: {stdout}{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
}
