//! The doctor: looks at a deployment from outside, as an app and as an MCP client, and says what is wrong with it and
//! which line mends it.
//!
//! It registers sessions of its own, lends tools, calls them, and deletes the sessions again. Everything is tried
//! through the public URL, so that what stands in front of the proxy is what is examined. Later checks need earlier
//! ones: where one of those fails, the rest is skipped rather than guessed at. Every wait has an end.

mod app;
mod calls;
mod explain;
mod finding;
mod fixes;
mod reach;
mod register;
mod streams;
mod tls;
mod tokens;
mod wire;

use std::time::Duration;

pub use finding::{Check, Finding, Fix, Report, State};
pub use wire::Base;

use crate::auth::Token;
use app::Bridge;
use register::Session;
use wire::Wire;

/// How long a bridge is silent, and a call takes, in a quick examination.
pub const QUICK_IDLE: Duration = Duration::from_secs(8);
/// The same in a thorough one: more than the 60 s after which many fronts lose patience, less than a tool may take.
pub const THOROUGH_IDLE: Duration = Duration::from_secs(75);
/// The longest that may be asked for: a call may take no longer unless the proxy is set otherwise.
pub const MAX_IDLE: Duration = Duration::from_secs(110);

/// What is examined, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The public base URL.
    pub base: Base,
    /// The token of apps.
    pub app_token: Token,
    /// The token of MCP clients.
    pub openclaw_token: Token,
    /// How long a bridge is left silent, and how long a long call takes.
    pub idle: Duration,
    /// The most bytes of a request that the proxy takes.
    pub max_body_bytes: usize,
}

/// What comes next cannot be tried; the report says why.
#[derive(Debug)]
struct Stop;

/// Examines a deployment.
pub async fn examine(options: &Options) -> Report {
    let mut report = Report::new(options.base.to_string(), [&options.app_token, &options.openclaw_token]);
    let _stopped = stages(options, &mut report).await;
    report.finish();
    report
}

async fn stages(options: &Options, report: &mut Report) -> Result<(), Stop> {
    let wire = reach::connect(&options.base, report).await?;
    reach::health(&wire, report).await?;
    tokens::check(&wire, options, report).await?;
    let session = register::register(&wire, options, report).await?;
    let mut sessions = vec![session];
    sessions_of_ours(&wire, options, &mut sessions, report).await;
    for session in &sessions {
        report.add(register::delete(&wire, options, session).await);
    }
    Ok(())
}

/// All that needs a session. Those that it registers are added to `sessions`, to be deleted.
async fn sessions_of_ours(wire: &Wire, options: &Options, sessions: &mut Vec<Session>, report: &mut Report) {
    let main = sessions[0].clone();
    let (finding, spoofed) = register::register_spoofed(wire, options, &main).await;
    report.add(finding);
    sessions.extend(spoofed);
    while sessions.len() < 3 {
        match register::register(wire, options, report).await {
            Ok(session) => sessions.push(session),
            Err(Stop) => return,
        }
    }
    let (idle, long) = (&sessions[1], &sessions[2]);
    let slow =
        async { tokio::join!(streams::idle_bridge(wire, options, idle), streams::long_call(wire, options, long)) };
    report.add(register::methods(wire, options, &main).await);
    let bridge = match Bridge::connect(wire, options, &main).await {
        Ok(bridge) => bridge,
        Err(finding) => {
            report.add(finding);
            // What needs no bridge is tried all the same.
            return without_bridge(wire, options, &main, report).await;
        }
    };
    report.add(Finding::ok(Check::Websocket, "A bridge opens."));
    let quick = async {
        without_bridge(wire, options, &main, report).await;
        with_bridge(wire, options, &main, bridge, report).await;
    };
    let ((idle, long), ()) = tokio::join!(slow, quick);
    report.add(idle);
    report.add(long);
}

async fn without_bridge(wire: &Wire, options: &Options, session: &Session, report: &mut Report) {
    report.add(calls::session_headers(wire, options, session).await);
    report.add(calls::trailing_slash(wire, options, session).await);
    report.add(calls::origin(wire, options, session).await);
}

async fn with_bridge(wire: &Wire, options: &Options, session: &Session, mut bridge: Bridge, report: &mut Report) {
    report.add(app::browser(wire, options).await);
    calls::round_trip(wire, options, session, &mut bridge, report).await;
    if report.has_problem(Check::RoundTrip) {
        return;
    }
    report.add(calls::mcp_headers(wire, options, session, &mut bridge).await);
    report.add(calls::body_size(wire, options, session, &mut bridge).await);
    report.add(streams::streaming(wire, options, session, &mut bridge).await);
    // It goes the way of a client whose headers that check is about.
    if !report.has_problem(Check::McpHeaders) {
        report.add(streams::cancel(wire, options, session, &mut bridge).await);
    }
}
