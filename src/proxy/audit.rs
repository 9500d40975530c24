//! The audit log: one line for each thing that somebody did or was refused, and never what it contained.
//!
//! Lines are events of a target of their own, and go to the file that OPENCLAW_PROXY_AUDIT_FILE names. Their fields:
//!
//! | `event` | fields beside `event` |
//! |---|---|
//! | `session_created` | `tenant`, `session`, `tools` |
//! | `session_ended` | `tenant`, `session`, `reason`: deleted, expired, revoked, shutdown |
//! | `tools_changed` | `tenant`, `session`, `tools` |
//! | `bridge_attached` | `tenant`, `session`, `epoch`, `address` |
//! | `bridge_detached` | `tenant`, `session`, `epoch`, `reason`, `duration_ms` |
//! | `call` | `tenant`, `session`, `tool`, `request_bytes`, `result_bytes`, `outcome`, `duration_ms` |
//! | `refused` | `side`: app, client; `address`, `status`, `reason`, `count` |
//!
//! `session` is the beginning of the id, `address` the client's behind trusted proxies. `request_bytes` are those of
//! the call's arguments, `result_bytes` those of what the app answered. `outcome` is what the client was told:
//! `tool_error` also for a result with `isError`, `malformed` for an answer that no client would take,
//! `result_too_large` also for one that is so only in the form that clients get.
//!
//! `status` is what was answered: the HTTP status (200 for a DELETE that deleted nothing), or a bridge's close code.
//! `reason` is `token` (none that is valid), `gate` (Host, Origin, doubled headers), `limit`, `foreign_session`
//! (another tenant's, or one with a token of its own), `session_secret` or `stopping`. Refusals of the same kind are
//! one line a second: the first one has `count` 1, a later one says how many followed it. An IPv6 address stands for
//! its /64; `address` is `several` if there are too many to tell apart.
//!
//! No line: `tools/list` and other questions, requests that are malformed, and sessions or tools that do not exist.
//! Lines that cannot be written are lost, and told in the program's log and in `audit_lines_lost_total`.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::protocol::SessionId;
use crate::proxy::metrics::Label;
use crate::proxy::records::RecentCall;
use crate::proxy::refusals::Told;
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
pub fn refused(told: &Told) {
    let Told { refusal, is_one, count } = told;
    let (side, reason, status) = (refusal.side.word(), refusal.why.word(), refusal.status);
    let address = if *is_one { refusal.address.to_string() } else { "several".into() };
    tracing::info!(target: TARGET, event = "refused", side, address, status, reason, count);
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
