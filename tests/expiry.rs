//! When sessions end by themselves. Time is passed in, so nothing sleeps; one test runs the real sweeper.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use openclaw_mcp_proxy::protocol::{Close, SessionId};
use openclaw_mcp_proxy::proxy::bridge::{Attempt, BridgeLimits, CallError, CallRequest, Next};
use openclaw_mcp_proxy::proxy::config::Config;
use openclaw_mcp_proxy::proxy::registry::{Entry, Full, Owner, Registry};
use openclaw_mcp_proxy::proxy::session::{Registration, ToolLimits, ToolSet};
use openclaw_mcp_proxy::proxy::tenants::{Role, Tenants};

use crate::support::{App, TestServer, until};

const TTL: Duration = Duration::from_secs(300);
const LIMITS: ToolLimits =
    ToolLimits { tools: 9, tool_bytes: 999, tools_bytes: 999, param_headers: 9, instructions_bytes: 99, json_depth: 9 };

const LIMITS_OF_BRIDGE: BridgeLimits = BridgeLimits {
    calls: 2,
    call_bytes: 1000,
    queue_bytes: 1000,
    result_bytes: 1000,
    progress_bytes: 100,
    json_depth: 9,
    resume_grace: Duration::ZERO,
};

fn registry(max_sessions: usize) -> Registry {
    Registry::new(TTL, max_sessions, 2, LIMITS_OF_BRIDGE, Arc::default(), None)
}

fn create(registry: &Registry, now: Instant) -> Result<Entry, Full> {
    let body = r#"{"device_id":"d","tools":[{"name":"t"}]}"#;
    let tenant = Tenants::new(&Config::default()).unwrap().find(Role::App, None).unwrap();
    let owner = Owner { tenant, secret: None, mcp_token: None };
    registry.create(Registration::parse(body, &LIMITS).unwrap(), owner, now)
}

fn attach(entry: &Entry, now: Instant) -> u64 {
    let Attempt::Attached(epoch) = entry.bridge.try_attach(None, now) else { panic!("not attached") };
    epoch
}

fn request() -> CallRequest<'static> {
    CallRequest {
        client_id: "1",
        tool: "t",
        arguments: "{}",
        kept_bytes: 2,
        progress: false,
        context: Default::default(),
        timeout: Duration::from_secs(120),
        cancel_on_drop: true,
    }
}

#[test]
fn a_session_without_a_bridge_lives_for_its_ttl_after_registration() {
    let start = Instant::now();
    let registry = registry(9);
    let id = create(&registry, start).unwrap().session.id;
    assert_eq!(registry.sweep(start + TTL - Duration::from_millis(1)), 0);
    assert!(registry.get(id, start + TTL - Duration::from_millis(1)).is_some());
    assert_eq!(registry.sweep(start + TTL), 1);
    assert!(registry.is_empty());
}

#[test]
fn an_expired_session_is_gone_on_read_before_the_sweep() {
    let start = Instant::now();
    let registry = registry(9);
    let id = create(&registry, start).unwrap().session.id;
    assert!(registry.get(id, start + TTL).is_none());
    assert!(registry.is_empty());
    assert_eq!(registry.sweep(start + TTL), 0);
}

#[test]
fn reading_is_no_sign_of_life_and_changing_tools_is() {
    let start = Instant::now();
    let registry = registry(9);
    let id = create(&registry, start).unwrap().session.id;
    for second in 0..299 {
        assert!(registry.get(id, start + Duration::from_secs(second)).is_some());
    }
    let later = start + Duration::from_secs(299);
    assert!(registry.update_tools(id, ToolSet::parse("[]", &LIMITS).unwrap(), later));
    assert_eq!(registry.sweep(start + TTL), 0);
    assert_eq!(registry.sweep(later + TTL), 1);
}

#[test]
fn a_connected_bridge_keeps_the_session_and_the_clock_starts_when_it_goes() {
    let start = Instant::now();
    let registry = registry(9);
    let entry = create(&registry, start).unwrap();
    let epoch = attach(&entry, start);
    let much_later = start + 10 * TTL;
    assert_eq!(registry.sweep(much_later), 0);
    assert_eq!(registry.expires_at(&entry), None);
    entry.bridge.detach(epoch, much_later);
    assert_eq!(registry.expires_at(&entry), Some(much_later + TTL));
    assert_eq!(registry.sweep(much_later + TTL - Duration::from_millis(1)), 0);
    assert_eq!(registry.sweep(much_later + TTL), 1);
    assert!(matches!(entry.bridge.try_attach(None, much_later + TTL), Attempt::Ended(Close::UnknownSession)));
}

#[test]
fn a_frame_from_the_app_is_a_sign_of_life() {
    let start = Instant::now();
    let registry = registry(9);
    let entry = create(&registry, start).unwrap();
    let epoch = attach(&entry, start);
    let later = start + Duration::from_secs(200);
    entry.bridge.sign_of_life(epoch, later);
    entry.bridge.sign_of_life(epoch + 1, later + TTL);
    entry.bridge.detach(epoch, later);
    assert_eq!(registry.expires_at(&entry), Some(later + TTL));
}

#[tokio::test]
async fn a_call_in_flight_keeps_the_session() {
    let start = Instant::now();
    let registry = registry(9);
    let entry = create(&registry, start).unwrap();
    let epoch = attach(&entry, start);
    let call = entry.bridge.call(request(), start).unwrap();
    assert!(matches!(entry.bridge.next_frame(epoch, start, Waker::noop()), Next::Send(_)));
    assert_eq!(entry.bridge.calls_in_flight(), 1);
    assert!(!entry.bridge.expire(TTL, start + 2 * TTL));
    drop(call);
    assert_eq!(entry.bridge.calls_in_flight(), 0);
    entry.bridge.detach(epoch, start);
    assert_eq!(registry.sweep(start + TTL), 1);
}

#[tokio::test]
async fn an_overdue_call_is_ended_though_nobody_waits_for_it() {
    let start = Instant::now();
    let registry = registry(9);
    let entry = create(&registry, start).unwrap();
    let epoch = attach(&entry, start);
    let _never_polled = entry.bridge.call(request(), start).unwrap();
    assert!(matches!(entry.bridge.next_frame(epoch, start, Waker::noop()), Next::Send(_)));
    let deadline = start + Duration::from_secs(120);
    registry.sweep(deadline + Duration::from_secs(5));
    assert_eq!(entry.bridge.calls_in_flight(), 1);
    registry.sweep(deadline + Duration::from_secs(6));
    assert_eq!(entry.bridge.calls_in_flight(), 0);
}

#[tokio::test]
async fn what_waits_for_an_app_is_bounded() {
    let start = Instant::now();
    let registry = registry(9);
    let entry = create(&registry, start).unwrap();
    let epoch = attach(&entry, start);
    let large = format!(r#"{{"x":"{}"}}"#, "x".repeat(600));
    let call = || entry.bridge.call(CallRequest { arguments: &large, ..request() }, start);
    let _first = call().unwrap();
    assert_eq!(call().unwrap_err(), CallError::QueueFull(1000));
    assert!(matches!(entry.bridge.next_frame(epoch, start, Waker::noop()), Next::Send(_)));
    let _second = call().unwrap();
    assert_eq!(entry.bridge.calls_in_flight(), 2);
}

#[test]
fn sessions_are_bounded_and_expired_ones_make_room() {
    let start = Instant::now();
    let registry = registry(2);
    let first = create(&registry, start).unwrap().session.id;
    create(&registry, start).unwrap();
    assert_eq!(create(&registry, start).unwrap_err(), Full::Everybody(2));
    assert!(registry.delete(first));
    create(&registry, start).unwrap();
    assert_eq!(registry.len(), 2);
    // Both have expired, though no sweep has run.
    create(&registry, start + TTL).unwrap();
    assert_eq!(registry.len(), 1);
    assert!(!registry.delete(SessionId::random()));
}

#[test]
fn of_many_threads_that_race_one_becomes_the_bridge() {
    let registry = Arc::new(registry(9));
    let now = Instant::now();
    for _ in 0..100 {
        let entry = create(&registry, now).unwrap();
        let attached = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| matches!(entry.bridge.try_attach(None, now), Attempt::Attached(_))))
                .collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).filter(|won| *won).count()
        });
        assert_eq!(attached, 1);
        assert_eq!(entry.bridge.connection().1, 1);
        registry.delete(entry.session.id);
    }
}

#[tokio::test]
async fn an_expired_session_is_unknown_to_everybody() {
    let server = TestServer::start(&[("SESSION_TTL_SECONDS", "0.4"), ("RESUME_GRACE_SECONDS", "0.1")]).await;
    let app = App::register(&server).await;
    let bridge = app.connect().await;
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert_eq!(app.client().rpc("1", "tools/list", "{}").await.status, 200);
    drop(bridge);
    until(async || app.client().rpc("1", "tools/list", "{}").await.status == 404).await;
    assert_eq!(app.status().await.status, 404);
    assert_eq!(app.dial().await.closed().await.0, 4404);
}

#[test]
fn whoever_is_refused_does_not_have_everybodys_sessions_looked_at_each_time() {
    let (start, ttl) = (Instant::now(), Duration::from_millis(100));
    let registry = Registry::new(ttl, 1, 2, LIMITS_OF_BRIDGE, Arc::default(), None);
    let at = |millis| start + Duration::from_millis(millis);
    create(&registry, start).unwrap();
    assert!(create(&registry, at(50)).is_err(), "this looks, in vain");
    assert!(create(&registry, at(200)).is_err(), "and this does not, although there would be room");
    assert!(create(&registry, at(1050)).is_ok());
}
