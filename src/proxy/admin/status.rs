//! What the status page shows, as JSON. Times are Unix seconds, durations milliseconds.
//!
//! However many sessions there are, what is shown every second looks at [`LISTED`] of them at the most: the rest are
//! counted where they come and go. Only a search looks at all, once, when somebody types.

use std::cmp::Reverse;
use std::ops::ControlFlow;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::exposition;
use crate::process;
use crate::protocol::SessionId;
use crate::proxy::ProxyState;
use crate::proxy::metrics::{Counters, Histogram, Label};
use crate::proxy::records::RecentCall;
use crate::proxy::registry::Entry;

/// How many tenants and sessions are listed.
const LISTED: usize = 200;
/// How much of a device's name is shown.
const MAX_CHARS: usize = 128;

/// All at a glance.
pub(super) fn status(state: &ProxyState) -> Value {
    let metrics = &state.records.metrics;
    let bounds = |histogram: &Histogram| -> Value {
        // JSON has no infinity, so the last one is null.
        histogram.buckets().into_iter().map(|(bound, _)| Value::from(bound * 1e3)).collect()
    };
    let mut status = counts(state);
    for (name, value) in [
        ("version", process::VERSION.into()),
        ("started", unix(state.started).into()),
        ("base_url", base_url(state).into()),
        ("draining", state.is_draining().into()),
        ("memory", exposition::usage().map(|usage| usage.memory).into()),
        ("sessions", json!({ "now": state.registry.len(), "limit": state.config.max_sessions })),
        ("bridges", metrics.bridges().into()),
        ("calls", json!({ "now": state.calls.now(), "limit": state.config.max_calls })),
        ("request_bytes", json!({ "now": state.request_bytes.now(), "limit": state.config.max_request_bytes })),
        ("connections", json!({ "now": state.connections(), "limit": state.config.max_connections })),
        ("tenants", tenants(state)),
        ("tenants_in_all", state.tenants.all().len().into()),
        ("session_list", first_sessions(state)),
        ("call_bounds", bounds(&metrics.call_time)),
        ("proxy_bounds", bounds(&metrics.proxy_time)),
        ("recent_calls", state.config.recent_calls.into()),
    ] {
        status[name] = value;
    }
    status
}

/// What has been counted up to now. What has not happened is left out.
pub(super) fn counts(state: &ProxyState) -> Value {
    let metrics = &state.records.metrics;
    json!({
        "now": unix(SystemTime::now()),
        "outcomes": by_kind(&metrics.calls),
        "limits": by_kind(&metrics.limits),
        "bridges_attached": metrics.bridges_attached.get(),
        "bridges_detached": metrics.bridges_detached.get(),
        "bridges_closed": by_kind(&metrics.bridges_closed),
        "sessions_created": metrics.sessions_created.get(),
        "sessions_ended": by_kind(&metrics.sessions_ended),
        "apps_refused": by_kind(&metrics.apps_refused),
        "clients_refused": by_kind(&metrics.clients_refused),
        "bad_frames": metrics.bad_frames.get(),
        "results_ignored": metrics.results_ignored.get(),
        "call_time": by_bucket(&metrics.call_time),
        "app_time": by_bucket(&metrics.app_time),
        "proxy_time": by_bucket(&metrics.proxy_time),
        "ping_time": by_bucket(&metrics.ping_time),
    })
}

/// The tenants that have most, with their bounds.
fn tenants(state: &ProxyState) -> Value {
    let mut tenants = state.tenants.all();
    tenants.sort_by_cached_key(|tenant| Reverse((tenant.sessions().now(), tenant.calls().now())));
    let listed = tenants.iter().take(LISTED).map(|tenant| {
        json!({
            "name": tenant.name(),
            "sessions": tenant.sessions().now(), "sessions_limit": tenant.sessions().limit(),
            "bridges": tenant.bridges().now(),
            "calls": tenant.calls().now(), "calls_limit": tenant.calls().limit(),
            "request_bytes": tenant.request_bytes().now(), "request_bytes_limit": tenant.request_bytes().limit(),
        })
    });
    listed.collect()
}

/// Some sessions; all of them, if there are not too many.
fn first_sessions(state: &ProxyState) -> Value {
    let mut rows = Vec::new();
    state.registry.each(|entry| {
        rows.push(row(state, entry));
        if rows.len() < LISTED { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    rows.into()
}

/// The sessions whose id, device or tenant contains `text` in any case: how many there are, and some of them.
pub(super) fn search(state: &ProxyState, text: &str) -> Value {
    let text = text.to_lowercase();
    let (mut found, mut rows) = (0, Vec::new());
    state.registry.each(|entry| {
        let contains = |member: &str| member.to_lowercase().contains(&text);
        let is_found =
            contains(device(entry)) || contains(entry.owner.tenant.name()) || contains(&entry.session.id.to_string());
        if is_found {
            found += 1;
            if rows.len() < LISTED {
                rows.push(row(state, entry));
            }
        }
        ControlFlow::Continue(())
    });
    json!({ "found": found, "sessions": rows })
}

/// One session, with what its user needs to connect a client.
pub(super) fn session(state: &ProxyState, id: SessionId) -> Option<Value> {
    let entry = state.registry.get(id, Instant::now())?;
    let mut session = row(state, &entry);
    let registration = &entry.session.registration;
    session["app_version"] = registration.app_version.as_deref().map(shortened).into();
    session["features"] = registration.features.names().into();
    session["tool_names"] = registration.tools.names().into();
    session["has_secret"] = entry.owner.secret.is_some().into();
    session["has_mcp_token"] = entry.owner.mcp_token.is_some().into();
    session["asks_for_token"] = state.tenants.asks_clients_for_token().into();
    session["mcp_url"] = format!("{}/v1/mcp/{id}", base_url(state)).into();
    session["has_public_url"] = state.config.public_url.is_some().into();
    session["call_ms"] = millis(state.config.tool_timeout.0).into();
    Some(session)
}

/// The `number`th call, which has ended.
pub(super) fn call(number: u64, call: &RecentCall) -> Value {
    json!({
        "n": number,
        "at": unix(call.at),
        "tenant": call.who.tenant.name(),
        "session": call.who.session.to_string(),
        "tool": call.tool,
        "outcome": call.end.word(),
        "request_bytes": call.request_bytes,
        "result_bytes": call.result_bytes,
        "ms": millis(call.time),
        "app_ms": call.app_time.map(millis),
    })
}

fn row(state: &ProxyState, entry: &Entry) -> Value {
    let (connection, epoch) = entry.bridge.connection();
    let left = state.registry.expires_at(entry).map(|at| at.saturating_duration_since(Instant::now()).as_secs());
    json!({
        "id": entry.session.id.to_string(),
        "tenant": entry.owner.tenant.name(),
        "device": device(entry),
        "tools": entry.session.registration.tools.len(),
        "connected_seconds": connection.map(|connection| connection.since.elapsed().as_secs()),
        "epoch": epoch,
        "ping_ms": connection.and_then(|connection| connection.ping).map(millis),
        "calls": entry.bridge.calls_in_flight(),
        "expires_in_seconds": left,
    })
}

/// What people call the app.
fn device(entry: &Entry) -> &str {
    let registration = &entry.session.registration;
    shortened(registration.device_name.as_deref().unwrap_or(&registration.device_id))
}

/// What apps say of themselves may be as long as a request.
fn shortened(text: &str) -> &str {
    text.char_indices().nth(MAX_CHARS).map_or(text, |(end, _)| &text[..end])
}

/// Where clients reach the proxy, as far as it knows without a request of theirs.
fn base_url(state: &ProxyState) -> String {
    match &state.config.public_url {
        Some(url) => url.base.clone(),
        None => state.address.tcp().map_or_else(|| "http://localhost".into(), |address| format!("http://{address}")),
    }
}

fn by_kind<L: Label>(counters: &Counters<L>) -> Value {
    let counts = L::ALL.iter().map(|kind| (kind.word().to_owned(), counters.get(*kind)));
    counts.filter(|(_, count)| *count > 0).map(|(word, count)| (word, Value::from(count))).collect()
}

/// How many fell into each bucket, and how long they took together.
fn by_bucket(histogram: &Histogram) -> Value {
    let counts: Vec<u64> = histogram.buckets().into_iter().map(|(_, count)| count).collect();
    json!({ "counts": counts, "sum": (histogram.sum() * 1e6).round() / 1e3 })
}

fn unix(at: SystemTime) -> f64 {
    let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    (seconds * 1e3).round() / 1e3
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::config::Config;
    use crate::proxy::listener::Listen;
    use crate::proxy::registry::Owner;
    use crate::proxy::session::Registration;
    use crate::proxy::tenants::Role;

    fn register(state: &ProxyState, body: &Value) {
        let limits = Config::default().tool_limits();
        let registration = Registration::parse(&body.to_string(), &limits).unwrap();
        let tenant = state.tenants.find(Role::App, None).unwrap();
        let owner = Owner { tenant, secret: None, mcp_token: None };
        state.registry.create(registration, owner, Instant::now()).unwrap();
    }

    #[test]
    fn a_status_costs_no_more_with_ten_thousand_sessions_than_with_those_that_are_listed() {
        let settings = [("OPENCLAW_PROXY_MAX_SESSIONS_PER_TENANT".to_owned(), "20000".to_owned())];
        let state =
            ProxyState::new(Config::from_pairs(settings).unwrap(), Listen::Tcp(([127, 0, 0, 1], 1).into()), None)
                .unwrap();
        let register =
            |count| (0..count).for_each(|n| register(&state, &json!({ "device_id": format!("device {n}") })));
        // Others use the machine, too: the fastest of many is what it costs.
        let cost = || {
            let time = || (Instant::now(), status(&state).to_string().len()).0.elapsed();
            (0..50).map(|_| time()).min().unwrap()
        };
        register(LISTED);
        let few = cost();
        register(10_000 - LISTED);
        let many = cost();
        let shown = status(&state);
        assert_eq!(
            (&shown["sessions"]["now"], shown["session_list"].as_array().unwrap().len()),
            (&json!(10_000), LISTED)
        );
        assert!(many < few * 3, "{few:?} with {LISTED} sessions, {many:?} with 10,000");
        let found = search(&state, "DEVICE 9000");
        assert_eq!((&found["found"], &found["sessions"][0]["device"]), (&json!(1), &json!("device 9000")));
        let found = search(&state, "device");
        assert_eq!((&found["found"], found["sessions"].as_array().unwrap().len()), (&json!(10_000), LISTED));
    }

    #[test]
    fn a_name_is_shown_up_to_a_bound() {
        let state = ProxyState::new(Config::default(), Listen::Tcp(([127, 0, 0, 1], 1).into()), None).unwrap();
        register(&state, &json!({ "device_id": "\u{e9}".repeat(512) }));
        assert_eq!(status(&state)["session_list"][0]["device"], "\u{e9}".repeat(MAX_CHARS));
    }
}
