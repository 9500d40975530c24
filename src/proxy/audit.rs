//! The audit log: one line for each thing that somebody did or was refused, and never what it contained.
//!
//! Lines are events of a target of their own, and go to the file that OPENCLAW_PROXY_AUDIT_FILE names. Their fields:
//!
//! | `event` | fields beside `event` |
//! |---|---|
//! | `session_created` | `tenant`, `session`, `tools` |
//! | `session_ended` | `tenant`, `session`, `reason`: deleted, expired, revoked |
//! | `tools_changed` | `tenant`, `session`, `tools` |
//! | `bridge_attached` | `tenant`, `session`, `epoch`, `address` |
//! | `bridge_detached` | `tenant`, `session`, `epoch`, `reason`, `duration_ms` |
//! | `call` | `tenant`, `session`, `tool`, `request_bytes`, `result_bytes`, `outcome`, `duration_ms` |
//! | `refused` | `side`: app, client; `address`, `status` |
//!
//! `session` is the beginning of the id, `address` the client's behind trusted proxies.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use http::StatusCode;

use crate::protocol::SessionId;
use crate::proxy::tenants::{Role, Tenant};

/// The target of all lines.
const TARGET: &str = crate::process::AUDIT_TARGET;

/// Whose session a line is about.
#[derive(Debug, Clone)]
pub struct Who {
    /// The tenant.
    pub tenant: Arc<Tenant>,
    /// The session.
    pub session: SessionId,
}

/// Whether anybody keeps the lines.
pub fn is_on() -> bool {
    tracing::event_enabled!(target: TARGET, tracing::Level::INFO)
}

/// A session was registered.
pub fn created(who: &Who, tools: usize) {
    let (session, tenant) = (who.session.short(), who.tenant.name());
    tracing::info!(target: TARGET, event = "session_created", tenant, %session, tools);
}

/// A session ended; `reason` is one of few words.
pub fn ended(who: &Who, reason: &'static str) {
    let (session, tenant) = (who.session.short(), who.tenant.name());
    tracing::info!(target: TARGET, event = "session_ended", tenant, %session, reason);
}

/// A session has other tools.
pub fn tools_changed(who: &Who, tools: usize) {
    let (session, tenant) = (who.session.short(), who.tenant.name());
    tracing::info!(target: TARGET, event = "tools_changed", tenant, %session, tools);
}

/// An app's socket became its session's bridge.
pub fn attached(who: &Who, epoch: u64, address: IpAddr) {
    let (session, tenant) = (who.session.short(), who.tenant.name());
    tracing::info!(target: TARGET, event = "bridge_attached", tenant, %session, epoch, %address);
}

/// It is that no longer.
pub fn detached(who: &Who, epoch: u64, reason: &str, since: Instant) {
    let (session, tenant) = (who.session.short(), who.tenant.name());
    let duration_ms = millis(since);
    tracing::info!(target: TARGET, event = "bridge_detached", tenant, %session, epoch, reason, duration_ms);
}

/// Somebody was not let in, or had too much.
pub fn refused(role: Role, address: IpAddr, status: StatusCode) {
    let side = match role {
        Role::App => "app",
        Role::Client => "client",
    };
    tracing::info!(target: TARGET, event = "refused", side, %address, status = status.as_u16());
}

/// A call, from its start on.
#[derive(Debug)]
pub struct CallRecord {
    who: Who,
    tool: Box<str>,
    request_bytes: usize,
    since: Instant,
}

impl CallRecord {
    /// Begins to record a call, if anybody keeps the lines.
    pub fn begin(who: impl FnOnce() -> Who, tool: &str, arguments: &str) -> Option<Self> {
        is_on().then(|| CallRecord {
            who: who(),
            tool: tool.into(),
            request_bytes: arguments.len(),
            since: Instant::now(),
        })
    }

    /// The call has ended.
    pub fn end(self, outcome: &'static str, result_bytes: usize) {
        let CallRecord { who, tool, request_bytes, since } = self;
        let (session, tenant, duration_ms) = (who.session.short(), who.tenant.name(), millis(since));
        tracing::info!(
            target: TARGET,
            event = "call",
            tenant,
            %session,
            tool = &*tool,
            request_bytes,
            result_bytes,
            outcome,
            duration_ms
        );
    }
}

fn millis(since: Instant) -> u64 {
    since.elapsed().as_millis() as u64
}
