//! The integration tests: a real server on port 0, real sockets, real clients. One binary, so it links once.
//!
//! What needs programs that only Unix has is left out elsewhere; `tests/windows.sh` runs the rest as Windows would.

#![allow(missing_docs, unreachable_pub, clippy::unwrap_used, reason = "a test is read by people and fails loudly")]
#![cfg_attr(windows, allow(dead_code, unused_imports, reason = "some tests are left out"))]

/// The server, an app and an MCP client, with verbs.
mod support;

/// The operator's listener.
mod admin;
/// The apps that cope with networks.
#[cfg(unix)]
mod apps;
/// The audit log: who did what.
#[cfg(unix)]
mod audit;
/// Tokens and who gets in.
mod auth;
/// The WebSocket protocol itself.
#[cfg(unix)]
mod autobahn;
/// Bridges: results, losses, takeovers, liveness.
mod bridge;
/// Requests to a browser-control host.
#[cfg(unix)]
mod browser;
/// The node's cameras.
#[cfg(target_os = "linux")]
mod camera;
/// The node's canvas, with a real browser.
#[cfg(unix)]
mod canvas;
/// A browser.
#[cfg(unix)]
mod chromium;
/// The real MCP clients.
#[cfg(unix)]
mod clients;
/// The official conformance suite.
#[cfg(unix)]
mod conformance;
/// The samples of deploy/ that no server of these tests reads.
#[cfg(target_os = "linux")]
mod deploy;
/// Notifications and the position, of a desktop.
#[cfg(all(unix, not(target_os = "macos")))]
mod desktop;
/// What the README promises.
#[cfg(unix)]
mod docs;
/// What is wrong with a deployment, and which line mends it.
#[cfg(unix)]
mod doctor;
/// Running programs, and who may say so.
#[cfg(unix)]
mod exec;
/// When sessions end by themselves.
mod expiry;
/// Real reverse proxies in front.
#[cfg(unix)]
mod front;
/// Whatever a peer sends.
#[cfg(unix)]
mod fuzz;
/// Whatever strangers, broken clients and bad apps send.
#[cfg(unix)]
mod hostile;
/// The container image.
#[cfg(target_os = "linux")]
mod image;
/// Large inputs cost what their bytes cost.
#[cfg(target_os = "linux")]
mod inputs;
/// Every bound on both sides.
mod limits;
/// Hearing of changes of the tools.
mod listen;
/// The node's local MCP server.
mod local_mcp;
/// The MCP endpoint.
mod mcp;
/// Networks that swallow everything.
#[cfg(unix)]
mod netns;
/// The node, which lends an MCP server.
#[cfg(unix)]
mod node;
/// What one tenant's noise costs another.
#[cfg(all(unix, not(debug_assertions)))]
mod noisy;
/// The program: the demo, exit codes, signals, logs.
mod program;
/// Alerts and the dashboard, with a real Prometheus.
#[cfg(unix)]
mod prometheus;
/// Sessions that outlive the process.
#[cfg(unix)]
mod restart;
/// Calls that outlive the socket that carried them.
mod resume;
/// The node's screen.
#[cfg(target_os = "linux")]
mod screen;
/// The node, which serves this computer's capabilities.
#[cfg(unix)]
mod serve;
/// What apps do over HTTP.
mod sessions;
/// Stopping without losing anything.
mod shutdown;
/// Clients that are slow on purpose.
#[cfg(target_os = "linux")]
mod slow;
/// What is said instead of starting.
#[cfg(target_os = "linux")]
mod start;
/// The operator's status page.
#[cfg(unix)]
mod status_page;
/// The stdio program.
mod stdio;
/// systemd's sockets, messages and units; Unix sockets.
#[cfg(target_os = "linux")]
mod systemd;
/// Many tenants: whose token opens what.
#[cfg(unix)]
mod tenants;
/// Traces: from the client to the app, and to a collector.
#[cfg(unix)]
mod trace;
/// Which commit the programs are of.
#[cfg(unix)]
mod version;
/// Speaking and listening.
#[cfg(target_os = "linux")]
mod voice;
/// The whole way: an MCP client, the proxy, the node, the desktop.
#[cfg(target_os = "linux")]
mod whole_way;
/// The command line for the local MCP server.
mod winnode;
