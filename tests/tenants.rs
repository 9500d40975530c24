//! Many tenants: whose token opens what, and that a stranger's session looks like none at all.

use std::path::PathBuf;

use openclaw_mcp_proxy::auth::TokenHash;
use serde_json::{Value, json};
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::Message;

use crate::program::{Log, PROGRAM, program, serving};
use crate::support::{App, McpClient, Reply, TestServer, http, send, soon, tools, until};

/// A file of tenants, removed with it.
struct TenantsFile(PathBuf);

impl TenantsFile {
    fn new(text: &str) -> Self {
        let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("tenants-{}.toml", uuid::Uuid::new_v4()));
        std::fs::write(&file, text).unwrap();
        TenantsFile(file)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for TenantsFile {
    fn drop(&mut self) {
        let _gone = std::fs::remove_file(&self.0);
    }
}

/// A tenant whose tokens are its name with `-app` and `-claw`.
fn tenant(name: &str, more: &str) -> String {
    let hash = |side: &str| TokenHash::of(format!("{name}-{side}").as_bytes());
    format!(
        "[[tenant]]\nname = \"{name}\"\napp_token_sha256 = [\"{}\"]\nopenclaw_token_sha256 = [\"{}\"]\n{more}\n",
        hash("app"),
        hash("claw")
    )
}

/// What does not depend on when it was asked.
fn shown(reply: &Reply) -> (u16, String, Vec<(String, String)>) {
    let headers = reply.headers.iter().filter(|(name, _)| *name != "date");
    let headers = headers.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect();
    (reply.status, reply.text.clone(), headers)
}

/// The close code with which a bridge ends at once, or `None` if it stays open.
async fn bridge_close(base: &str, id: &str, authorization: &[&str]) -> Option<u16> {
    let url = format!("{}/v1/chat/sessions/{id}/bridge", base.replace("http://", "ws://"));
    let mut request = url.into_client_request().unwrap();
    for value in authorization {
        request.headers_mut().append("authorization", value.parse().unwrap());
    }
    match soon(connect_async(request)).await {
        Err(tokio_tungstenite::tungstenite::Error::Http(response)) => Some(response.status().as_u16()),
        Err(error) => panic!("{error}"),
        Ok((mut socket, _)) => {
            use futures_util::StreamExt;
            // A bridge that is accepted is greeted or silent; one that is not is closed at once.
            match tokio::time::timeout(std::time::Duration::from_millis(300), socket.next()).await {
                Ok(Some(Ok(Message::Close(Some(close))))) => Some(close.code.into()),
                Ok(Some(Ok(_))) | Err(_) => None,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn every_token_at_every_endpoint() {
    let file = TenantsFile::new(&(tenant("a", "") + &tenant("b", "")));
    let server = TestServer::start(&[("TENANTS_FILE", file.path()), ("MAX_DENIALS_PER_SECOND_PER_ADDRESS", "0")]).await;
    let register = async |token| App::register_as(&server, json!({ "device_id": "d", "tools": tools(&["t"]) }), token);
    let unknown = "0123456789abcdef0123456789abcdef";
    let sessions = format!("{}/v1/chat/sessions", server.base);
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    // Authorization; then: POST session, own session, foreign session, own bridge, foreign bridge, own MCP, foreign MCP.
    let rows: [(&[&str], [u16; 7]); 9] = [
        (&["Bearer a-app"], [200, 200, 404, 0, 4404, 401, 401]),
        (&["bearer a-app"], [200, 200, 404, 0, 4404, 401, 401]),
        (&["Bearer a-claw"], [401, 401, 401, 4401, 4401, 200, 404]),
        (&["Bearer b-app"], [200, 404, 200, 4404, 0, 401, 401]),
        (&["Bearer b-claw"], [401, 401, 401, 4401, 4401, 404, 200]),
        (&[], [401, 401, 401, 4401, 4401, 401, 401]),
        (&["Bearer wrong"], [401, 401, 401, 4401, 4401, 401, 401]),
        (&["Bearer "], [401, 401, 401, 4401, 4401, 401, 401]),
        (&["Bearer a-app", "Bearer a-app"], [400, 400, 400, 400, 400, 400, 400]),
    ];
    for (authorization, expected) in rows {
        let (own, foreign) = (register("a-app").await.await, register("b-app").await.await);
        let with = |mut request: reqwest::RequestBuilder| {
            for value in authorization {
                request = request.header("authorization", *value);
            }
            request
        };
        let create = send(with(http().post(&sessions).json(&json!({ "device_id": "d" })))).await;
        let show = async |id: &str| send(with(http().get(format!("{sessions}/{id}")))).await;
        let put = async |id: &str| {
            send(with(http().put(format!("{sessions}/{id}/tools")).json(&json!({ "tools": tools(&["t"]) })))).await
        };
        let delete = async |id: &str| send(with(http().delete(format!("{sessions}/{id}")))).await;
        let mcp =
            async |id: &str| send(with(McpClient::new(&format!("{}/v1/mcp/{id}", server.base)).request(ping))).await;
        let by_header = async |id: &str| {
            let request = McpClient::new(&format!("{}/v1/mcp", server.base)).request(ping);
            send(with(request.header("x-openclaw-session-id", id))).await
        };
        let bridge = async |id: &str| bridge_close(&server.base, id, authorization).await.unwrap_or(0);
        let found = [
            create.status,
            show(&own.id).await.status,
            show(&foreign.id).await.status,
            bridge(&own.id).await,
            bridge(&foreign.id).await,
            mcp(&own.id).await.status,
            mcp(&foreign.id).await.status,
        ];
        assert_eq!(found, expected, "{authorization:?}");
        // Whatever is not the caller's looks as if it did not exist, and nothing happens to it.
        for (id, is_own) in [(&own.id, expected[1] == 200), (&foreign.id, expected[2] == 200)] {
            if !is_own {
                assert_eq!(shown(&show(id).await), shown(&show(unknown).await), "{authorization:?}");
                assert_eq!(shown(&put(id).await), shown(&put(unknown).await), "{authorization:?}");
                assert_eq!(shown(&delete(id).await), shown(&delete(unknown).await), "{authorization:?}");
            }
        }
        for (id, is_own) in [(&own.id, expected[5] == 200), (&foreign.id, expected[6] == 200)] {
            if !is_own {
                assert_eq!(shown(&mcp(id).await), shown(&mcp(unknown).await), "{authorization:?}");
                assert_eq!(shown(&by_header(id).await), shown(&by_header(unknown).await), "{authorization:?}");
            }
        }
        assert_eq!((own.status().await.status, foreign.status().await.status), (200, 200), "{authorization:?}");
        assert_eq!(send(http().get(format!("{}/health", server.base))).await.status, 200);
    }
}

#[tokio::test]
async fn a_session_with_a_secret_opens_to_nobody_without_it() {
    let server = TestServer::start(&[("APP_TOKEN", "app-token-of-all")]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["t"]), "want_session_secret": true });
    let app = App::register_as(&server, registration, "app-token-of-all").await;
    let secret = app.registration["session_secret"].as_str().unwrap().to_owned();
    assert_eq!(secret.len(), 43);
    for (given, status, close) in
        [(None, 404, Some(4404)), (Some("wrong"), 404, Some(4404)), (Some(&*secret), 200, None)]
    {
        let with = |request: reqwest::RequestBuilder| {
            let request = request.bearer_auth("app-token-of-all");
            given.into_iter().fold(request, |request, secret| request.header("x-session-secret", secret))
        };
        assert_eq!(send(with(http().get(app.session_url()))).await.status, status, "{given:?}");
        let put = with(http().put(format!("{}/tools", app.session_url())).json(&json!({ "tools": tools(&["t"]) })));
        assert_eq!(send(put).await.status, status, "{given:?}");
        // By header, and as web pages do.
        let encode = |text: &str| {
            use base64::Engine;
            base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(text)
        };
        let protocols = ["openclaw-bridge".to_owned(), format!("bearer.{}", encode("app-token-of-all"))];
        let as_page: Vec<String> =
            protocols.into_iter().chain(given.map(|secret| format!("session-secret.{}", encode(secret)))).collect();
        let mut by_header = app.bridge_url.as_str().into_client_request().unwrap();
        by_header.headers_mut().insert("authorization", "Bearer app-token-of-all".parse().unwrap());
        if let Some(secret) = given {
            by_header.headers_mut().insert("x-session-secret", secret.parse().unwrap());
        }
        let mut by_page = app.bridge_url.as_str().into_client_request().unwrap();
        by_page.headers_mut().insert("sec-websocket-protocol", as_page.join(", ").parse().unwrap());
        for request in [by_header, by_page] {
            let (mut socket, _) = soon(connect_async(request)).await.unwrap();
            use futures_util::StreamExt;
            let first = tokio::time::timeout(std::time::Duration::from_millis(300), socket.next()).await;
            let closed = match first {
                Ok(Some(Ok(Message::Close(Some(close))))) => Some(u16::from(close.code)),
                _ => None,
            };
            assert_eq!(closed, close, "{given:?}");
            let _closed = socket.close(None).await;
        }
        assert_eq!(send(with(http().delete(app.session_url()))).await.text, r#"{"ok":true}"#);
        let owner = http().get(app.session_url()).bearer_auth("app-token-of-all").header("x-session-secret", &secret);
        assert_eq!(send(owner).await.status, if status == 200 { 404 } else { 200 }, "only the owner deletes it");
    }
    let every = TestServer::start(&[("REQUIRE_SESSION_SECRET", "true")]).await;
    assert!(App::register(&every).await.registration["session_secret"].is_string());
    assert_eq!(App::register(&server_without_secrets().await).await.registration.as_object().unwrap().len(), 3);
}

async fn server_without_secrets() -> TestServer {
    TestServer::start(&[]).await
}

#[tokio::test]
async fn a_sessions_own_mcp_token_opens_this_session_and_nothing_else() {
    for settings in [&[("OPENCLAW_TOKEN", "claw-token-of-all")][..], &[]] {
        let server = TestServer::start(settings).await;
        let registration = json!({ "device_id": "d", "tools": tools(&["t"]), "want_mcp_token": true });
        let app = App::register_with(&server, registration).await;
        let other = App::register(&server).await;
        let own = app.registration["mcp_token"].as_str().unwrap().to_owned();
        let list = async |url: &str, token: &str| {
            McpClient::new(url).header("authorization", &format!("Bearer {token}")).rpc("1", "tools/list", "{}").await
        };
        assert_eq!(list(&app.mcp_url, &own).await.status, 200);
        let unknown = format!("{}/v1/mcp/0123456789abcdef0123456789abcdef", server.base);
        let shared = list(&app.mcp_url, "claw-token-of-all").await;
        assert_eq!(shown(&shared), shown(&list(&unknown, "claw-token-of-all").await));
        assert_eq!(shared.status, 404);
        if !settings.is_empty() {
            for url in [&*other.mcp_url, &unknown, &format!("{}/v1/mcp", server.base)] {
                assert_eq!(list(url, &own).await.status, 401, "{url}");
            }
        }
        // In a header instead of the path, and through a whole call.
        let _bridge = app.connect().await.echo();
        let client = McpClient::new(&format!("{}/v1/mcp", server.base))
            .header("authorization", &format!("Bearer {own}"))
            .header("x-openclaw-session-id", &app.id);
        assert!(!client.call("t", r#"{"a":1}"#).await.is_tool_error());
    }
}

#[tokio::test]
async fn each_tenant_has_its_own_bounds() {
    let file = TenantsFile::new(&(tenant("a", "max_sessions = 2\nmax_calls = 1") + &tenant("b", "")));
    let server = TestServer::start(&[("TENANTS_FILE", file.path()), ("MAX_CALLS", "2"), ("MAX_SESSIONS", "4")]).await;
    let create = async |token: &str| {
        let request = http().post(format!("{}/v1/chat/sessions", server.base)).bearer_auth(token);
        send(request.json(&json!({ "device_id": "d", "tools": tools(&["slow"]) }))).await
    };
    let register = async |token: &str| {
        App::register_as(&server, json!({ "device_id": "d", "tools": tools(&["slow"]) }), token).await
    };
    let (a1, a2) = (register("a-app").await, register("a-app").await);
    let full = create("a-app").await;
    assert_eq!((full.status, full.header("retry-after")), (429, Some("1")));
    assert!(full.text.contains("2 chat sessions already, as many as this tenant may have"), "{}", full.text);
    let (b1, _b2) = (register("b-app").await, register("b-app").await);
    let full = create("b-app").await;
    assert_eq!((full.status, full.header("retry-after")), (503, Some("1")));
    a2.delete().await;
    a2.delete().await;
    let a2 = register("a-app").await;

    let (mut bridge_a1, _bridge_a2, mut bridge_b1) = (a1.connect().await, a2.connect().await, b1.connect().await);
    let client = |app: &App, tenant: &str| app.client().header("authorization", &format!("Bearer {tenant}-claw"));
    let first = client(&a1, "a").spawn_call("1", "slow", "{}");
    let (id, _, _) = bridge_a1.invoked().await;
    // The tenant's bound counts across its sessions.
    let busy = client(&a2, "a").call_as("7", "slow", "{}").await;
    assert_eq!((busy.status, busy.header("retry-after")), (429, Some("1")));
    let error = busy.json();
    assert_eq!(
        (&error["id"], &error["error"]["code"], &error["error"]["data"]["retryAfterMs"]),
        (&json!(7), &json!(429), &json!(1000))
    );
    // Another tenant is not held up by it, until there are as many calls as there may be in all.
    let second = client(&b1, "b").spawn_call("1", "slow", "{}");
    let (second_id, _, _) = bridge_b1.invoked().await;
    let busy = client(&b1, "b").call("slow", "{}").await;
    assert_eq!((busy.status, &busy.json()["error"]["code"]), (503, &json!(503)));
    bridge_a1.answer(&id, r#""ok":true,"content":1"#).await;
    bridge_b1.answer(&second_id, r#""ok":true,"content":2"#).await;
    for (call, expected) in [(first, "1"), (second, "2")] {
        assert_eq!(soon(call).await.unwrap().tool_text(), expected);
    }
    // What has ended counts no more, however it has ended.
    for _ in 0..3 {
        let dropped = client(&a2, "a").spawn_call("9", "slow", "{}");
        until(async || a2.status_with("a-app").await["calls_in_flight"] == 1).await;
        dropped.abort();
        until(async || a2.status_with("a-app").await["calls_in_flight"] == 0).await;
    }
    let again = client(&a1, "a").spawn_call("1", "slow", "{}");
    bridge_a1.answer_next(r#""ok":true,"content":3"#).await;
    assert_eq!(soon(again).await.unwrap().tool_text(), "3");
}

#[tokio::test]
async fn the_requests_of_one_tenant_leave_room_for_anothers() {
    let file = TenantsFile::new(&(tenant("a", "max_request_bytes = 50000") + &tenant("b", "")));
    let settings = [("MAX_TOOL_BYTES", "4096"), ("MAX_TOOLS_BYTES", "8192"), ("MAX_BODY_BYTES", "20480")];
    let limits =
        [("TENANTS_FILE", file.path()), ("MAX_REQUEST_BYTES_PER_TENANT", "60000"), ("MAX_REQUEST_BYTES", "90000")];
    let server = TestServer::start(&[&settings[..], &limits[..]].concat()).await;
    let register = async |token: &str| {
        App::register_as(&server, json!({ "device_id": "d", "tools": tools(&["slow"]) }), token).await
    };
    let (a, b) = (register("a-app").await, register("b-app").await);
    let (mut bridge_a, mut bridge_b) = (a.connect().await, b.connect().await);
    let client = |app: &App, tenant: &str| app.client().header("authorization", &format!("Bearer {tenant}-claw"));
    let arguments = format!(r#"{{"x":"{}"}}"#, "x".repeat(19_800));
    let calls = ["1", "2"].map(|id| client(&a, "a").spawn_call(id, "slow", &arguments));
    let ids = [bridge_a.invoked().await.0, bridge_a.invoked().await.0];
    let full = client(&a, "a").call_as("7", "slow", &arguments).await;
    assert_eq!((full.status, full.header("retry-after"), &full.json()["error"]["code"]), (429, Some("1"), &json!(429)));
    assert!(full.text.contains("this tenant") && full.text.contains("limit: 50000 bytes"), "{}", full.text);
    // The other tenant has its own bound, until all together have too much.
    let others = ["1", "2"].map(|id| client(&b, "b").spawn_call(id, "slow", &arguments));
    let other_ids = [bridge_b.invoked().await.0, bridge_b.invoked().await.0];
    assert_eq!(client(&b, "b").call("slow", &arguments).await.status, 503);
    bridge_a.answer(&ids[0], r#""ok":true,"content":1"#).await;
    let [first, second] = calls;
    assert_eq!(soon(first).await.unwrap().tool_text(), "1");
    let third = client(&b, "b").spawn_call("3", "slow", &arguments);
    let third_id = bridge_b.invoked().await.0;
    for (bridge, id) in [(&mut bridge_a, &ids[1]), (&mut bridge_b, &other_ids[0])] {
        bridge.answer(id, r#""ok":true,"content":2"#).await;
    }
    for id in [&other_ids[1], &third_id] {
        bridge_b.answer(id, r#""ok":true,"content":2"#).await;
    }
    let [other, another] = others;
    for call in [second, other, another, third] {
        assert_eq!(soon(call).await.unwrap().tool_text(), "2");
    }
}

impl App {
    async fn status_with(&self, token: &str) -> Value {
        send(http().get(self.session_url()).bearer_auth(token)).await.json()
    }
}

#[tokio::test]
async fn sighup_changes_who_may_enter_and_no_bridge_of_a_token_that_is_still_there_falls() {
    let file = TenantsFile::new(&(tenant("a", "") + &tenant("b", "")));
    let (child, base) = serving(&[("LISTEN", "127.0.0.1:0"), ("TENANTS_FILE", file.path())]).await;
    let register = async |token: &str| {
        App::register_at_as(&base, json!({ "device_id": "d", "tools": tools(&["t"]) }), token).await
    };
    let (a, b) = (register("a-app").await, register("b-app").await);
    let (bridge_a, mut bridge_b) = (a.connect().await, b.connect().await);
    let call = async |tenant: &str| {
        let claw = format!("Bearer {tenant}-claw");
        a.client().header("authorization", &claw).call("t", "{}").await.status
    };
    let echo = bridge_a.echo();
    assert_eq!(call("a").await, 200);
    // A file that cannot be used changes nothing.
    std::fs::write(&file.0, "[[tenant]]\nname = 1").unwrap();
    hang_up(&child).await;
    assert_eq!(call("a").await, 200);
    // a's tokens are rotated, b goes.
    let rotated = tenant("a", "").replace("a-app", "").replace(
        &TokenHash::of(b"a-claw").to_string(),
        &format!("{}\", \"{}", TokenHash::of(b"new-claw"), TokenHash::of(b"newer-claw")),
    );
    std::fs::write(&file.0, rotated).unwrap();
    hang_up(&child).await;
    until(async || call("a").await == 401).await;
    assert_eq!((call("new").await, call("newer").await), (200, 200), "over the same bridge as before");
    assert_eq!(bridge_b.closed().await.0, 4401);
    assert_eq!(b.status().await.status, 401);
    assert!(!echo.is_finished());
}

#[tokio::test]
async fn a_new_token_comes_with_the_hash_for_the_file() {
    let output = tokio::process::Command::new(PROGRAM).arg("token").env_clear().output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    assert_eq!(value("SHA-256:"), TokenHash::of(value("token:").as_bytes()).to_string());
}

/// Tells a program to read its files again.
async fn hang_up(child: &tokio::process::Child) {
    let pid = child.id().unwrap().to_string();
    assert!(tokio::process::Command::new("kill").args(["-HUP", &pid]).status().await.unwrap().success());
}

/// Puts a pipe that nobody writes to in the place of a file.
fn replace_by_pipe(path: &std::path::Path) {
    std::fs::remove_file(path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[tokio::test]
async fn a_pipe_in_the_place_of_a_file_holds_up_nothing_and_its_end_is_no_hang() {
    let file = TenantsFile::new(&tenant("a", ""));
    let audit = TenantsFile::new("");
    let settings = [("LISTEN", "127.0.0.1:0"), ("TENANTS_FILE", file.path()), ("AUDIT_FILE", audit.path())];
    let mut child = program(&settings).spawn().unwrap();
    let mut log = Log::of(&mut child);
    let base = log.until("url=").await.split("url=").nth(1).unwrap().to_owned();
    replace_by_pipe(&file.0);
    replace_by_pipe(&audit.0);
    hang_up(&child).await;
    log.until("it is no regular file; correct OPENCLAW_PROXY_TENANTS_FILE").await;
    for _ in 0..8 {
        App::register_at_as(&base, json!({ "device_id": "d" }), "a-app").await;
    }
    let pid = child.id().unwrap().to_string();
    assert!(tokio::process::Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
    assert!(soon(child.wait()).await.unwrap().success());
    if !log.seen.contains("the audit log cannot be opened anew") {
        log.until("the audit log cannot be opened anew").await;
    }
    // Nor does it start with one.
    for (setting, path) in [("TENANTS_FILE", file.path()), ("AUDIT_FILE", audit.path())] {
        let output = soon(program(&[("LISTEN", "127.0.0.1:0"), (setting, path)]).output()).await.unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(78), "{stderr}");
        assert!(stderr.contains("regular file") && !stderr.contains("cannot listen"), "{stderr}");
    }
}

#[tokio::test]
async fn a_file_of_tenants_that_is_missing_or_wrong_is_said_with_the_code_of_a_setting() {
    let file = TenantsFile::new("[[tenant]]\nname = 1\n");
    let missing = format!("{}.missing", file.path());
    for (path, says) in [(file.path(), "line 2"), (&*missing, "cannot be read: No such file")] {
        let output = soon(program(&[("LISTEN", "127.0.0.1:0"), ("TENANTS_FILE", path)]).output()).await.unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(78), "{stderr}");
        let last = stderr.lines().last().unwrap();
        assert!(last.starts_with("openclaw-mcp-proxy: The file of tenants") && last.contains(says), "{stderr}");
    }
}

/// Sends a request without the end of its body; the answer comes when that is sent.
async fn begin_request(base: &str, line: &str, token: &str, body: &str) -> tokio::net::TcpStream {
    let mut stream = tokio::net::TcpStream::connect(base.trim_start_matches("http://")).await.unwrap();
    let head = format!(
        "{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let (begun, _) = body.split_at(body.len() - 1);
    tokio::io::AsyncWriteExt::write_all(&mut stream, format!("{head}{begun}").as_bytes()).await.unwrap();
    stream
}

async fn end_request(mut stream: tokio::net::TcpStream) -> String {
    tokio::io::AsyncWriteExt::write_all(&mut stream, b"}").await.unwrap();
    let mut answer = String::new();
    soon(tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut answer)).await.unwrap();
    answer
}

#[tokio::test]
async fn who_is_removed_while_a_request_arrives_gets_nothing_and_does_not_come_back() {
    let both = tenant("a", "") + &tenant("b", "");
    let file = TenantsFile::new(&both);
    let (child, base) = serving(&[("LISTEN", "127.0.0.1:0"), ("TENANTS_FILE", file.path())]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["t"]), "want_mcp_token": true });
    let app = App::register_at_as(&base, registration.clone(), "a-app").await;
    let shared = App::register_at_as(&base, json!({ "device_id": "d", "tools": tools(&["t"]) }), "a-app").await;
    let list = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#;
    let token = app.registration["mcp_token"].as_str().unwrap();
    let requests = [
        ("POST /v1/chat/sessions".to_owned(), "a-app", registration.to_string()),
        (format!("PUT /v1/chat/sessions/{}/tools", app.id), "a-app", r#"{"tools":[]}"#.to_owned()),
        (format!("POST /v1/mcp/{}", shared.id), "a-claw", list.to_owned()),
        (format!("POST /v1/mcp/{}", app.id), token, list.to_owned()),
    ];
    let mut begun = Vec::new();
    for (line, token, body) in &requests {
        begun.push(begin_request(&base, line, token, body).await);
    }
    // Their heads have been read when a later request has been answered, in most cases.
    for _ in 0..20 {
        assert_eq!(app.status().await.status, 200);
    }
    std::fs::write(&file.0, tenant("b", "")).unwrap();
    hang_up(&child).await;
    until(async || app.status().await.status == 401).await;
    for (stream, (line, ..)) in begun.into_iter().zip(&requests) {
        let answer = end_request(stream).await;
        assert!(answer.starts_with("HTTP/1.1 401"), "{line}: {answer}");
    }
    // The name comes back, as somebody else.
    std::fs::write(&file.0, &both).unwrap();
    hang_up(&child).await;
    until(async || app.status().await.status == 404).await;
    let client = app.client().header("authorization", &format!("Bearer {token}"));
    assert_eq!(client.rpc("1", "tools/list", "{}").await.status, 401);
}

#[tokio::test]
async fn a_bridge_whose_token_is_gone_is_closed_and_its_calls_go_on_with_the_new_one() {
    let hash = |token: &str| TokenHash::of(token.as_bytes()).to_string();
    let with = |tokens: &[&str]| {
        let own = tokens.iter().map(|token| hash(token)).collect::<Vec<_>>().join("\", \"");
        tenant("a", "").replace(&hash("a-app"), &own)
    };
    let file = TenantsFile::new(&with(&["old-app", "new-app"]));
    let (child, base) = serving(&[("LISTEN", "127.0.0.1:0"), ("TENANTS_FILE", file.path())]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["t"]), "bridge_features": ["resume", "tools"] });
    let old = App::register_at_as(&base, registration.clone(), "old-app").await;
    let kept = App::register_at_as(&base, registration, "new-app").await;
    let (mut bridge, mut kept_bridge) = (old.connect().await, kept.connect().await);
    for bridge in [&mut bridge, &mut kept_bridge] {
        assert_eq!(bridge.recv().await["type"], "hello");
    }
    let client = |app: &App| app.client().header("authorization", "Bearer a-claw");
    let call = client(&old).spawn_call("1", "t", "{}");
    let (id, ..) = bridge.invoked().await;
    std::fs::write(&file.0, with(&["new-app"])).unwrap();
    hang_up(&child).await;
    assert_eq!(bridge.closed().await.0, 4401);
    let mut again = App { token: "new-app".into(), ..old.clone() }.dial().await;
    assert_eq!(again.recv().await["pending"], json!([id]));
    again.answer(&id, r#""ok":true,"content":"done""#).await;
    assert_eq!(soon(call).await.unwrap().tool_text(), "done");
    let call = client(&kept).spawn_call("1", "t", "{}");
    kept_bridge.answer_next(r#""ok":true,"content":"still here""#).await;
    assert_eq!(soon(call).await.unwrap().tool_text(), "still here");
    assert_eq!(bridge_close(&base, &old.id, &["Bearer old-app"]).await, Some(4401));
}

#[tokio::test]
async fn a_subprotocol_with_nothing_in_it_is_no_token() {
    let server = TestServer::start(&[("APP_TOKEN", "an-app-token")]).await;
    let app = App::register_as(&server, json!({ "device_id": "d" }), "an-app-token").await;
    let mut request = app.bridge_url.as_str().into_client_request().unwrap();
    request.headers_mut().insert("sec-websocket-protocol", "openclaw-bridge, bearer.".parse().unwrap());
    let (mut socket, _) = soon(connect_async(request)).await.unwrap();
    let first = soon(futures_util::StreamExt::next(&mut socket)).await;
    assert!(matches!(first, Some(Ok(Message::Close(Some(close)))) if u16::from(close.code) == 4401));
}
