//! MCP's official conformance suite, through the bridge: its tools are lent by a small app of its own.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::clients::clients_dir;
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
