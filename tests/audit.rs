//! The audit log: a line for everything that somebody did or was refused, and never what it held.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use openclaw_mcp_proxy::auth::TokenHash;
use serde_json::{Value, json};

use crate::program::{Log, program, serving};
use crate::support::{App, McpClient, http, send, soon, tools, until};

struct AuditLog(PathBuf);

impl AuditLog {
    fn new() -> Self {
        AuditLog(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("audit-{}.jsonl", uuid::Uuid::new_v4())))
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap_or_default()
    }

    /// The lines of this event, without their times.
    fn lines(&self, event: &str) -> Vec<Value> {
        let text = self.text();
        // The last line may be half written.
        let text = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
        lines.filter(|line| line["event"] == event).collect()
    }

    async fn has(&self, event: &str, count: usize) -> Vec<Value> {
        until(async || self.lines(event).len() >= count).await;
        self.lines(event)
    }
}

impl Drop for AuditLog {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.0);
    }
}

#[tokio::test]
async fn every_deed_has_a_line_and_no_line_has_content() {
    let log = AuditLog::new();
    let settings = [
        ("LISTEN", "127.0.0.1:0"),
        ("APP_TOKEN", "canary-app-token"),
        ("OPENCLAW_TOKEN", "canary-claw-token"),
        ("AUDIT_FILE", log.0.to_str().unwrap()),
        ("LOG", "trace"),
        ("TOOL_TIMEOUT_SECONDS", "1"),
        ("MAX_CALLS_PER_TENANT", "1"),
    ];
    let (child, base) = serving(&settings).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["echo"]), "want_session_secret": false });
    let app = App::register_at_as(&base, registration, "canary-app-token").await;
    let client = app.client().header("authorization", "Bearer canary-claw-token");
    let arguments = r#"{"x":"canary-argument"}"#;
    client.call("echo", arguments).await;
    let mut bridge = app.connect().await;
    let call = client.spawn_call("1", "echo", arguments);
    let (id, _, _) = bridge.invoked().await;
    assert_eq!(client.call("echo", arguments).await.status, 429);
    bridge.answer(&id, r#""ok":true,"content":"canary-result""#).await;
    soon(call).await.unwrap();
    let failing = client.spawn_call("2", "echo", arguments);
    bridge.answer_next(r#""ok":false,"error":"canary-result""#).await;
    soon(failing).await.unwrap();
    client.call("echo", arguments).await;
    bridge.invoked().await;
    let leaving = client.spawn_call("4", "echo", arguments);
    bridge.invoked().await;
    leaving.abort();
    log.has("call", 6).await;
    let put = http().put(format!("{}/tools", app.session_url())).bearer_auth("canary-app-token");
    assert_eq!(send(put.json(&json!({ "tools": tools(&["a", "b"]) }))).await.status, 200);
    assert_eq!(send(http().get(app.session_url()).bearer_auth("canary-wrong")).await.status, 401);
    let wrong = McpClient::new(&app.mcp_url).header("authorization", "Bearer canary-wrong");
    assert_eq!(wrong.rpc("1", "ping", "{}").await.status, 401);
    let page = http().get(app.session_url()).header("origin", "https://evil.example");
    assert_eq!(send(page).await.status, 403);
    app.delete().await;

    let short = &app.id[..8];
    let of_session = |line: &Value| assert_eq!((&line["tenant"], &line["session"]), (&json!("default"), &json!(short)));
    let created = &log.has("session_created", 1).await[0];
    of_session(created);
    assert_eq!(created["tools"], 1);
    let attached = &log.has("bridge_attached", 1).await[0];
    of_session(attached);
    assert_eq!((&attached["epoch"], &attached["address"]), (&json!(1), &json!("127.0.0.1")));
    let calls = log.has("call", 6).await;
    calls.iter().for_each(of_session);
    let outcomes: Vec<_> = calls.iter().map(|call| call["outcome"].as_str().unwrap()).collect();
    assert_eq!(outcomes, ["not_connected", "tenant_busy", "ok", "tool_error", "timeout", "client_gone"]);
    let sizes = |call: &Value| (call["request_bytes"].as_u64().unwrap(), call["result_bytes"].as_u64().unwrap());
    assert_eq!([sizes(&calls[0]), sizes(&calls[2]), sizes(&calls[3])], [(23, 0), (23, 15), (23, 13)]);
    assert!(calls.iter().all(|call| call["tool"] == "echo"));
    assert!((1000..3000).contains(&calls[4]["duration_ms"].as_u64().unwrap()), "{}", calls[4]);
    assert_eq!(log.has("tools_changed", 1).await[0]["tools"], 2);
    let ended = &log.has("session_ended", 1).await[0];
    of_session(ended);
    assert_eq!(ended["reason"], "deleted");
    let detached = &log.has("bridge_detached", 1).await[0];
    assert!(detached["reason"].is_string() && detached["duration_ms"].is_u64(), "{detached}");
    let refusals = log.has("refused", 3).await;
    let shown: Vec<_> = refusals.iter().map(|line| (line["side"].as_str(), line["status"].as_u64())).collect();
    assert_eq!(shown, [(Some("app"), Some(401)), (Some("client"), Some(401)), (Some("app"), Some(403))]);
    let text = log.text();
    assert!(text.lines().all(|line| line.contains("\"timestamp\":")));
    for canary in ["canary", &app.id] {
        assert!(!text.contains(canary), "{text}");
    }

    // Rotated as logrotate does it.
    let old = log.0.with_extension("1");
    std::fs::rename(&log.0, &old).unwrap();
    let pid = child.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
    until(async || Path::new(&log.0).exists()).await;
    App::register_at_as(&base, json!({ "device_id": "d" }), "canary-app-token").await;
    log.has("session_created", 1).await;
    std::fs::remove_file(old).unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(&log.0).unwrap().permissions().mode() & 0o777, 0o600);
    }
}

/// What was refused: side, status, reason, and how often.
type Refusals = BTreeMap<(String, u64, String), u64>;

impl AuditLog {
    fn refusals(&self) -> Refusals {
        let mut refusals = Refusals::new();
        for line in self.lines("refused") {
            let text = |name: &str| line[name].as_str().unwrap().to_owned();
            assert_eq!(text("address"), "127.0.0.1");
            let kind = (text("side"), line["status"].as_u64().unwrap(), text("reason"));
            *refusals.entry(kind).or_default() += line["count"].as_u64().unwrap();
        }
        refusals
    }
}

#[tokio::test]
async fn each_refusal_is_told_with_what_was_answered_and_why() {
    let log = AuditLog::new();
    let hash = |token: &str| TokenHash::of(token.as_bytes());
    let tenants = log.0.with_extension("toml");
    let text = ["a", "b"].map(|name| {
        let (app, claw) = (hash(&format!("{name}-app")), hash(&format!("{name}-claw")));
        format!("[[tenant]]\nname = \"{name}\"\napp_token_sha256 = [\"{app}\"]\nopenclaw_token_sha256 = [\"{claw}\"]\n")
    });
    std::fs::write(&tenants, text.concat()).unwrap();
    let settings = [
        ("LISTEN", "127.0.0.1:0"),
        ("TENANTS_FILE", tenants.to_str().unwrap()),
        ("AUDIT_FILE", log.0.to_str().unwrap()),
        ("LEGACY_SSE", "true"),
        ("MAX_SESSIONS_PER_TENANT", "2"),
        ("MAX_REQUEST_BYTES_PER_TENANT", "8388608"),
    ];
    let (mut child, base) = serving(&settings).await;
    let sessions = format!("{base}/v1/chat/sessions");
    let registration = json!({ "device_id": "d", "tools": tools(&["t"]), "want_session_secret": true });
    let secret = App::register_at_as(&base, registration, "a-app").await;
    let app = App::register_at_as(&base, json!({ "device_id": "d", "tools": tools(&["t"]) }), "a-app").await;
    let unknown = format!("{sessions}/0123456789abcdef0123456789abcdef");
    let foreign = app.client().header("authorization", "Bearer b-claw");
    assert_eq!(foreign.rpc("1", "tools/list", "{}").await.status, 404);
    assert_eq!(foreign.call("t", "{}").await.status, 404);
    for (request, status) in [
        (http().get(app.session_url()).bearer_auth("b-app"), 404),
        (http().delete(app.session_url()).bearer_auth("b-app"), 200),
        (http().get(secret.session_url()).bearer_auth("a-app"), 404),
        (http().get(&app.mcp_url).header("accept", "text/event-stream"), 401),
        (http().post(&sessions).bearer_auth("a-app").json(&json!({ "device_id": "d" })), 429),
        // No bridges, for all their names.
        (http().head(format!("{}/bridge", app.session_url())), 401),
        (http().post(format!("{sessions}/bridge")), 401),
        (http().get(format!("{}/bridge", app.session_url())), 426),
        // None of these is refused.
        (http().get(&unknown).bearer_auth("a-app"), 404),
        (http().delete(&unknown).bearer_auth("a-app"), 200),
        (http().get(app.session_url()).bearer_auth("a-app"), 200),
    ] {
        let reply = send(request).await;
        assert_eq!(reply.status, status, "{}", reply.text);
    }
    for (token, code) in [("b-app", 4404), ("wrong", 4401)] {
        assert_eq!(App { token: token.into(), ..app.clone() }.dial().await.closed().await.0, code);
    }
    let expected: Refusals = [
        (("client", 404, "foreign_session"), 2),
        (("app", 404, "foreign_session"), 1),
        (("app", 200, "foreign_session"), 1),
        (("app", 4404, "foreign_session"), 1),
        (("app", 404, "session_secret"), 1),
        (("client", 401, "token"), 1),
        (("app", 401, "token"), 2),
        (("app", 426, "token"), 1),
        (("app", 4401, "token"), 1),
        (("app", 429, "limit"), 1),
    ]
    .map(|((side, status, reason), count)| ((side.to_owned(), status, reason.to_owned()), count))
    .into();
    until(async || log.refusals().values().sum::<u64>() >= expected.values().sum()).await;
    assert_eq!(log.refusals(), expected);
    let pid = child.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(soon(child.wait()).await.unwrap().success());
    let ended = log.lines("session_ended");
    assert_eq!(ended.len(), 2);
    assert!(ended.iter().all(|line| line["reason"] == "shutdown"));
    std::fs::remove_file(tenants).unwrap();
}

#[tokio::test]
async fn the_outcome_is_what_the_client_was_told() {
    // Answered as a whole, and at the end of a stream.
    for stream_after in ["5", "0"] {
        let log = AuditLog::new();
        let settings = [
            ("LISTEN", "127.0.0.1:0"),
            ("AUDIT_FILE", log.0.to_str().unwrap()),
            ("STREAM_AFTER_SECONDS", stream_after),
            ("MAX_RESULT_BYTES", "2000"),
        ];
        let (_child, base) = serving(&settings).await;
        let app = App::register_at(&base, json!({ "device_id": "d", "tools": tools(&["t"]) })).await;
        let mut bridge = app.connect().await;
        // Escaped once more, it takes twice as many bytes.
        let large = format!(r#""ok":true,"content":["{}"]"#, r#"\""#.repeat(700));
        let answers = [
            (r#""ok":true,"content":1"#, "ok", false),
            (r#""result":{"content":[],"isError":true}"#, "tool_error", true),
            (r#""result":{"content":[{"type":"nope"}]}"#, "malformed", true),
            (&large, "result_too_large", true),
            (r#""ok":false,"error":"no""#, "tool_error", true),
            (r#""ok":false,"error":{"code":7,"message":"no"}"#, "rpc_error", false),
        ];
        for (answer, _, is_error) in answers {
            let request = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"t"}}"#;
            let call = tokio::spawn(app.client().request(request).send());
            let (id, ..) = bridge.invoked().await;
            let text = if stream_after == "0" {
                // The stream has begun.
                let response = soon(call).await.unwrap().unwrap();
                bridge.answer(&id, answer).await;
                soon(response.text()).await.unwrap()
            } else {
                bridge.answer(&id, answer).await;
                soon(soon(call).await.unwrap().unwrap().text()).await.unwrap()
            };
            assert_eq!(text.contains(r#""isError":true"#), is_error, "{text}");
            assert_eq!(text.contains("event: message"), stream_after == "0", "{text}");
        }
        let calls = log.has("call", answers.len()).await;
        for (call, (_, outcome, _)) in calls.iter().zip(answers) {
            assert_eq!(call["outcome"], outcome, "{stream_after}");
        }
    }
}

#[tokio::test]
async fn a_flood_of_refusals_is_a_few_lines_that_say_how_many() {
    let log = AuditLog::new();
    let settings = [("LISTEN", "127.0.0.1:0"), ("APP_TOKEN", "a-token"), ("AUDIT_FILE", log.0.to_str().unwrap())];
    let (_child, base) = serving(&settings).await;
    let (http, since) = (http(), std::time::Instant::now());
    for _ in 0..500 {
        assert!(matches!(send(http.post(format!("{base}/v1/chat/sessions"))).await.status, 401 | 429));
    }
    let seconds = usize::try_from(since.elapsed().as_secs()).unwrap();
    until(async || log.refusals().values().sum::<u64>() == 500).await;
    // Of each of the two statuses one at once, and one for each second that has begun.
    let lines = log.lines("refused").len();
    assert!(lines <= 2 * (seconds + 3), "{lines} in {seconds} s");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn lines_that_cannot_be_written_are_told_and_counted() {
    let settings = [("LISTEN", "127.0.0.1:0"), ("ADMIN_LISTEN", "127.0.0.1:0"), ("AUDIT_FILE", "/dev/full")];
    let mut child = program(&settings).spawn().unwrap();
    let mut log = Log::of(&mut child);
    let after = |line: &str, name: &str| line.split(name).nth(1).unwrap().split(' ').next().unwrap().to_owned();
    let base = after(&log.until("url=").await, "url=");
    let admin = after(&log.until("admin=").await, "admin=");
    for _ in 0..3 {
        App::register_at(&base, json!({ "device_id": "d" })).await;
    }
    let told = log.until("the audit log lost lines").await;
    assert!(told.contains("No space left on device"), "{told}");
    let count = async || send(http().get(format!("{admin}/metrics"))).await.text;
    until(async || count().await.contains("openclaw_proxy_audit_lines_lost_total 3\n")).await;
}
