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
use crate::proxy::metrics::{Label, Side};
use crate::proxy::records::RecentCall;
use crate::proxy::tenants::Tenant;

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
pub fn refused(side: Side, address: IpAddr, status: StatusCode) {
    let side = side.word();
    tracing::info!(target: TARGET, event = "refused", side, %address, status = status.as_u16());
}

/// A call has ended.
pub fn called(call: &RecentCall) {
    let (session, tenant) = (call.who.session.short(), call.who.tenant.name());
    let RecentCall { tool, request_bytes, result_bytes, .. } = call;
    let (outcome, duration_ms) = (call.end.word(), call.time.as_millis() as u64);
    tracing::info!(
        target: TARGET,
        event = "call",
        tenant,
        %session,
        tool = &**tool,
        request_bytes,
        result_bytes,
        outcome,
        duration_ms
    );
}

fn millis(since: Instant) -> u64 {
    since.elapsed().as_millis() as u64
}
