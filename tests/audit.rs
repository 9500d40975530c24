//! The audit log: a line for everything that somebody did or was refused, and never what it held.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::program::serving;
use crate::support::{App, McpClient, http, send, soon, tools, until};

struct Log(PathBuf);

impl Log {
    fn new() -> Self {
        Log(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("audit-{}.jsonl", uuid::Uuid::new_v4())))
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap_or_default()
    }

    /// The lines of this event, without their times.
    fn lines(&self, event: &str) -> Vec<Value> {
        let text = self.text();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
        lines.filter(|line| line["event"] == event).collect()
    }

    async fn has(&self, event: &str, count: usize) -> Vec<Value> {
        until(async || self.lines(event).len() >= count).await;
        self.lines(event)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.0);
    }
}

#[tokio::test]
async fn every_deed_has_a_line_and_no_line_has_content() {
    let log = Log::new();
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
