//! The stdio program as an MCP client runs it: a real process between its pipes and a real proxy.

use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;

use crate::support::{App, TestServer, http, send, soon, timed, tools, until};

const PROGRAM: &str = env!("CARGO_BIN_EXE_openclaw-mcp-stdio");
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

/// The program, running, with the client's ends of its pipes.
struct Shim {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Option<Lines<BufReader<ChildStdout>>>,
    stderr: Lines<BufReader<ChildStderr>>,
}

impl Shim {
    fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    fn start_with(args: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(PROGRAM);
        command.args(args).env_clear().envs(environment.iter().copied());
        Self::spawn(command)
    }

    /// One that names the session by its flag.
    fn of(server: &TestServer, app: &App) -> Self {
        Self::start(&["--proxy-base-url", &server.base, "--session-id", &app.id])
    }

    fn spawn(mut command: Command) -> Self {
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipes.kill_on_drop(true).spawn().unwrap();
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().map(|stdout| BufReader::new(stdout).lines());
        let stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        Shim { child, stdin, stdout, stderr }
    }

    /// Waits until the program has logged this.
    async fn logged(&mut self, text: &str) {
        while !soon(self.stderr.next_line()).await.unwrap().expect("stderr has ended").contains(text) {}
    }

    async fn send(&mut self, line: &str) {
        soon(self.stdin.as_mut().unwrap().write_all(format!("{line}\n").as_bytes())).await.unwrap();
    }

    /// A request of a legacy client.
    async fn request(&mut self, id: &str, method: &str, params: &str) {
        self.send(&format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#)).await;
    }

    /// A request of a 2026-07-28 client; `params` is what follows `_meta` in its params.
    async fn modern(&mut self, id: &str, method: &str, params: &str) {
        self.modern_with(id, method, r#""x":1"#, params).await;
    }

    /// The same, with a member of its own in `_meta`.
    async fn modern_with(&mut self, id: &str, method: &str, meta: &str, params: &str) {
        let version = r#""io.modelcontextprotocol/protocolVersion":"2026-07-28""#;
        let meta = format!(r#"{{{version},"io.modelcontextprotocol/clientCapabilities":{{}},{meta}}}"#);
        self.request(id, method, &format!(r#"{{"_meta":{meta}{params}}}"#)).await;
    }

    async fn cancel(&mut self, id: &str) {
        let params = format!(r#"{{"requestId":{id}}}"#);
        self.send(&format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}"#)).await;
    }

    /// The next line, as it is; `None` at the end of stdout.
    async fn next_line(&mut self) -> Option<String> {
        soon(self.stdout.as_mut().unwrap().next_line()).await.unwrap()
    }

    async fn line(&mut self) -> String {
        self.next_line().await.expect("stdout has ended")
    }

    async fn answer(&mut self) -> Value {
        let line = self.line().await;
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// The next answer's id and error code.
    async fn refusal(&mut self) -> (Value, Value, String) {
        let mut answer = self.answer().await;
        let error = answer["error"].take();
        (answer["id"].take(), error["code"].clone(), error["message"].as_str().unwrap_or_default().to_owned())
    }

    /// Closes stdin; gives the lines that still come, and how the program ended.
    async fn finish(mut self) -> (Vec<String>, ExitStatus) {
        drop(self.stdin.take());
        let mut lines = Vec::new();
        while let Some(line) = self.next_line().await {
            lines.push(line);
        }
        (lines, soon(self.child.wait()).await.unwrap())
    }
}

/// A server that gives prepared answers, one a connection, and tells what it was sent.
async fn stub(answers: Vec<String>) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, requests) = mpsc::channel(64);
    tokio::spawn(async move {
        for answer in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let request = read_request(&mut stream).await;
            sender.send(request).await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    (url, requests)
}

async fn read_request(stream: &mut TcpStream) -> String {
    let mut request = Vec::new();
    loop {
        soon(stream.read_buf(&mut request)).await.unwrap();
        let text = String::from_utf8_lossy(&request).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.to_ascii_lowercase().lines().find_map(|l| l.strip_prefix("content-length: ")?.parse().ok());
        if body.len() >= length.unwrap_or(0) {
            return text;
        }
    }
}

fn http_answer(status: &str, content_type: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\nconnection: close\r\n\r\n{body}")
}

fn json_answer(body: &str) -> String {
    http_answer("200 OK", "application/json", body)
}

/// The value of a header of a raw request.
fn header<'a>(request: &'a str, name: &str) -> Option<&'a str> {
    request.lines().find_map(|line| {
        let (key, value) = line.split_once(": ")?;
        key.eq_ignore_ascii_case(name).then_some(value)
    })
}

fn initialize(id: &str, extra: &str) -> String {
    let params = format!(
        r#"{{"protocolVersion":"2025-06-18","capabilities":{{}},"clientInfo":{{"name":"c","version":"1"}}{extra}}}"#
    );
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"initialize","params":{params}}}"#)
}

async fn app_with(server: &TestServer, tool: &str) -> App {
    App::register_with(server, json!({ "device_id": "d", "tools": tools(&[tool]) })).await
}

#[tokio::test]
async fn the_trace_of_a_call_reaches_the_app() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["echo"]), "bridge_features": ["context"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let mut shim = Shim::of(&server, &app);
    let trace = r#""traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01""#;
    let legacy = format!(r#"{{"name":"echo","_meta":{{{trace}}}}}"#);
    shim.request("1", "tools/call", &legacy).await;
    let told: Value = serde_json::from_str(&format!("{{{trace}}}")).unwrap();
    assert_eq!(bridge.recv().await["meta"], told);
    shim.modern_with("2", "tools/call", trace, r#","name":"echo""#).await;
    assert_eq!(bridge.recv().await["meta"], told);
}

#[tokio::test]
async fn two_lines_and_the_end_of_stdin_are_answered() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut shim = Shim::start_with(&[], &[("OPENCLAW_PROXY_SERVER_URL", &server.base)]);
    shim.send(&initialize("1", &format!(r#","mcpSessionId":"{}""#, app.id))).await;
    shim.send(INITIALIZED).await;
    // The last line need not be ended.
    soon(shim.stdin.as_mut().unwrap().write_all(br#"{"jsonrpc":"2.0","id":"two","method":"tools/list"}"#))
        .await
        .unwrap();
    let (lines, status) = shim.finish().await;
    assert_eq!(status.code(), Some(0));
    let answers: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    // The handshake is over before the list is asked for, so the order is known.
    assert_eq!((answers.len(), &answers[0]["id"], &answers[1]["id"]), (2, &json!(1), &json!("two")));
    assert_eq!(answers[0]["result"]["protocolVersion"], "2025-06-18");
    assert_eq!(answers[1]["result"]["tools"][0]["name"], "echo");
}

#[tokio::test]
async fn the_session_is_named_by_initialize_before_the_flag_before_the_environment() {
    let server = TestServer::start(&[]).await;
    let apps =
        [app_with(&server, "in_env").await, app_with(&server, "in_flag").await, app_with(&server, "in_params").await];
    let env = [("OPENCLAW_PROXY_SERVER_URL", &*server.base), ("OPENCLAW_PROXY_SESSION_ID", &apps[0].id)];
    let flag = ["--session-id", &apps[1].id];
    let member = format!(r#","mcpSessionId":"{}""#, apps[2].id);
    for (flag, member, tool) in
        [(&flag[..0], "", "in_env"), (&flag[..], "", "in_flag"), (&flag[..], &*member, "in_params")]
    {
        let mut shim = Shim::start_with(flag, &env);
        shim.send(&initialize("1", member)).await;
        shim.answer().await;
        shim.request("2", "tools/list", "{}").await;
        assert_eq!(shim.answer().await["result"]["tools"][0]["name"], tool);
    }
    // A whole URL needs none.
    let mut shim = Shim::start(&["--url", &apps[0].mcp_url]);
    shim.request("1", "tools/list", "{}").await;
    assert_eq!(shim.answer().await["result"]["tools"][0]["name"], "in_env");
}

#[tokio::test]
async fn an_unbound_client_is_told_how_to_bind_and_can() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut shim = Shim::start(&["--proxy-base-url", &server.base]);
    shim.send(&initialize("1", "")).await;
    let (id, code, message) = shim.refusal().await;
    assert_eq!((id, code), (json!(1), json!(-32602)));
    for way in ["mcpSessionId", "--session-id", "OPENCLAW_PROXY_SESSION_ID"] {
        assert!(message.contains(way), "{message}");
    }
    // As a legacy server answers it: clients of both eras go on to initialize.
    shim.modern("2", "server/discover", "").await;
    assert_eq!(shim.refusal().await.1, -32601);
    shim.modern("3", "tools/list", "").await;
    assert_eq!(shim.refusal().await.1, 400);
    shim.send(&initialize("4", r#","mcpSessionId":7"#)).await;
    assert!(shim.refusal().await.2.contains("must be a string"));
    shim.send(&initialize("5", r#","mcpSessionId":"${SESSION_ID}""#)).await;
    assert!(shim.refusal().await.2.contains("literal ${…}"));
    shim.send(&initialize("6", &format!(r#","mcpSessionId":"{}""#, app.id))).await;
    assert!(shim.answer().await["result"].is_object());
    shim.modern("7", "tools/list", "").await;
    assert!(shim.answer().await["result"].is_object());
}

#[tokio::test]
async fn what_was_not_expanded_is_named() {
    let url = "OPENCLAW_PROXY_SERVER_URL";
    for (environment, what) in [
        ([("OPENCLAW_PROXY_SESSION_ID", "${SESSION_ID}"), (url, "http://127.0.0.1:9")], "session id"),
        ([("OPENCLAW_PROXY_OPENCLAW_TOKEN", "${TOKEN}"), (url, "http://127.0.0.1:9")], "token"),
        ([("OPENCLAW_PROXY_SESSION_ID", "s"), (url, "${URL}")], "URL"),
    ] {
        let mut shim = Shim::start_with(&[], &environment);
        shim.send(&initialize("1", "")).await;
        let (id, _, message) = shim.refusal().await;
        assert_eq!(id, 1);
        assert!(message.contains("literal ${…}") && message.contains(what), "{message}");
    }
}

#[tokio::test]
async fn the_session_travels_in_a_header_and_the_member_does_not() {
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-03-26"}}"#;
    let accepted = "HTTP/1.1 202 Accepted\r\nconnection: close\r\n\r\n".to_owned();
    let (url, mut requests) = stub(vec![json_answer(answer), accepted, json_answer(r#"{"id":2,"result":{}}"#)]).await;
    let mut shim = Shim::start_with(&["--token", "secret"], &[("OPENCLAW_PROXY_SERVER_URL", &url)]);
    shim.send(&initialize("1", r#","mcpSessionId":"s1""#)).await;
    shim.send(INITIALIZED).await;
    shim.request("2", "tools/list", "{}").await;
    for (body, version) in [(initialize("1", ""), None), (INITIALIZED.to_owned(), Some("2025-03-26"))] {
        let request = soon(requests.recv()).await.unwrap();
        assert!(request.starts_with("POST /v1/mcp HTTP/1.1\r\n") && request.ends_with(&body), "{request}");
        assert_eq!(header(&request, "mcp-session-id"), Some("s1"));
        assert_eq!(header(&request, "authorization"), Some("Bearer secret"));
        assert_eq!(header(&request, "accept"), Some("application/json, text/event-stream"));
        assert_eq!(header(&request, "mcp-protocol-version"), version);
        assert_eq!(header(&request, "mcp-method"), None);
    }
    assert_eq!(shim.line().await, answer);
    assert_eq!(shim.answer().await["id"], 2);
}

#[tokio::test]
async fn a_slow_call_holds_up_nobody() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let mut shim = Shim::of(&server, &app);
    shim.request("1", "tools/call", r#"{"name":"slow"}"#).await;
    let (request_id, _, _) = bridge.invoked().await;
    shim.request("2", "tools/list", "{}").await;
    assert_eq!(shim.answer().await["id"], 2);
    bridge.answer(&request_id, r#""ok":true,"content":"done""#).await;
    assert_eq!(shim.answer().await["result"]["content"][0]["text"], "done");
}

#[tokio::test]
async fn what_was_asked_before_stdin_ended_is_answered() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let mut shim = Shim::of(&server, &app);
    shim.request("1", "tools/call", r#"{"name":"slow"}"#).await;
    let (request_id, _, _) = bridge.invoked().await;
    let finishing = tokio::spawn(shim.finish());
    bridge.answer(&request_id, r#""ok":true,"content":"late""#).await;
    let (lines, status) = soon(finishing).await.unwrap();
    assert!(lines.len() == 1 && lines[0].contains("late") && status.success(), "{lines:?}");
}

#[tokio::test]
async fn changes_of_the_tools_are_told_to_those_who_listen() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["old"]), "bridge_features": ["tools"] });
    let app = App::register_with(&server, registration).await;
    let mut shim = Shim::of(&server, &app);
    shim.modern("\"l\"", "subscriptions/listen", r#","notifications":{"toolsListChanged":true}"#).await;
    assert_eq!(shim.answer().await["method"], "notifications/subscriptions/acknowledged");
    let put = http().put(format!("{}/tools", app.session_url())).json(&json!({ "tools": tools(&["new"]) }));
    assert_eq!(send(put).await.status, 200);
    assert_eq!(shim.answer().await["method"], "notifications/tools/list_changed");
    shim.modern("1", "tools/list", "").await;
    assert_eq!(shim.answer().await["result"]["tools"][0]["name"], "new");
    // The end of the session ends the subscription, which is then answered.
    app.delete().await;
    assert_eq!(shim.answer().await["id"], "l");
}

#[tokio::test]
async fn the_end_of_stdin_ends_subscriptions() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut shim = Shim::start(&["--url", &format!("http://{}", listener.local_addr().unwrap())]);
    shim.modern("1", "subscriptions/listen", "").await;
    // It would never be answered.
    let (mut connection, _) = soon(listener.accept()).await.unwrap();
    read_request(&mut connection).await;
    let (lines, status) = shim.finish().await;
    assert!(lines.is_empty() && status.success(), "{lines:?}");
}

#[tokio::test]
async fn a_batch_is_answered_in_one_line() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut shim = Shim::of(&server, &app);
    let ping = |id: &str| format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#);
    shim.send(&format!("[{},{INITIALIZED},{}]", ping("1"), ping("\"b\""))).await;
    let answers = shim.answer().await;
    assert_eq!((&answers[0]["id"], &answers[1]["id"], answers.as_array().unwrap().len()), (&json!(1), &json!("b"), 2));
    app.delete().await;
    shim.send(&format!("[{}]", ping("2").replace("ping", "tools/list"))).await;
    assert_eq!(shim.answer().await[0]["error"]["code"], 404);
}

#[tokio::test]
async fn progress_comes_as_it_happens_and_the_result_last() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["progress"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let mut shim = Shim::of(&server, &app);
    for modern in [false, true] {
        let token = r#""progressToken":"t""#;
        if modern {
            shim.modern_with("7", "tools/call", token, r#","name":"slow""#).await;
        } else {
            shim.request("7", "tools/call", &format!(r#"{{"name":"slow","_meta":{{{token}}}}}"#)).await;
        }
        let (request_id, _, _) = bridge.invoked().await;
        for progress in ["1", "2.50"] {
            let frame = format!(r#"{{"type":"tool_progress","request_id":"{request_id}","progress":{progress}}}"#);
            bridge.send_text(frame).await;
            // The result does not exist yet, so nothing was held back until it did.
            let line = shim.line().await;
            assert!(line.contains(&format!(r#"{token},"progress":{progress}"#)), "{line}");
        }
        bridge.answer(&request_id, r#""ok":true,"content":"end""#).await;
        assert_eq!(shim.answer().await["id"], 7);
    }
}

#[tokio::test]
async fn cancelled_requests_are_cancelled_at_the_app_and_not_answered() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["cancel"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    let mut shim = Shim::of(&server, &app);
    // An id is meant by its value; a late cancellation and one of nothing are ignored.
    for (modern, id, meant, reason) in
        [(false, "1", "1.0", "cancelled"), (true, r#""\u0061""#, r#""a""#, "client_disconnected")]
    {
        let params = r#""name":"slow""#;
        if modern {
            shim.modern(id, "tools/call", &format!(",{params}")).await;
        } else {
            shim.request(id, "tools/call", &format!("{{{params}}}")).await;
        }
        let (request_id, _, _) = bridge.invoked().await;
        shim.cancel("\"other\"").await;
        shim.cancel(meant).await;
        let frame = bridge.recv().await;
        let expected = (&json!("cancel_tool"), &json!(request_id), &json!(reason));
        assert_eq!((&frame["type"], &frame["request_id"], &frame["reason"]), expected);
        until(async || app.status().await.json()["calls_in_flight"] == 0).await;
        shim.cancel(meant).await;
        shim.request("9", "ping", "{}").await;
        assert_eq!(shim.answer().await["id"], 9, "the cancelled request was answered");
    }
    let (lines, status) = shim.finish().await;
    assert!(lines.is_empty() && status.success(), "{lines:?}");
}

#[tokio::test]
async fn refusals_become_errors_with_the_requests_id() {
    const RIGHT: &str = "the-right-token-is-long";
    let server = TestServer::start(&[("OPENCLAW_TOKEN", RIGHT)]).await;
    let unknown = "0123456789abcdef0123456789abcdef";
    for (token, code, says) in
        [("", 401, "token is missing"), ("wrong", 401, "not valid"), (RIGHT, 404, "no such chat session")]
    {
        let environment = [("OPENCLAW_PROXY_OPENCLAW_TOKEN", token), ("OPENCLAW_PROXY_SESSION_ID", unknown)];
        let mut shim = Shim::start_with(&["--proxy-base-url", &server.base], &environment);
        shim.request(r#""a\u0062""#, "tools/list", "{}").await;
        let line = shim.line().await;
        assert!(line.contains(r#""id":"a\u0062""#) && line.contains(&format!(r#""code":{code},"#)), "{line}");
        assert!(line.contains(says), "{line}");
    }
    // The proxy's own JSON-RPC errors are passed on as they are.
    let app = App::register(&server).await;
    let mut shim = Shim::start(&["--url", &app.mcp_url, "--token", RIGHT]);
    shim.modern("1", "no/such", "").await;
    assert_eq!(shim.refusal().await.1, -32601);
    shim.request("2", "tools/call", r#"{"name":"unknown"}"#).await;
    assert_eq!(shim.refusal().await.1, -32602);
    shim.send("{").await;
    assert_eq!(shim.refusal().await.1, -32700);
}

#[tokio::test]
async fn answers_that_are_none_become_errors_with_the_requests_id() {
    let event = "event: message\ndata: {\"method\":\"notifications/progress\",\ndata: \"params\":{}}\n\n";
    let cases = [
        (http_answer("200 OK", "text/event-stream", event), 502, "the stream ended"),
        (
            http_answer("200 OK", "application/json", r#"{"jsonrpc":"2.0","id":8,"result":{}}"#),
            502,
            "does not name the request",
        ),
        (http_answer("200 OK", "text/html", "<html>"), 502, "text/html"),
        (http_answer("202 Accepted", "", ""), 502, "notification"),
        (http_answer("502 Bad Gateway", "text/html", "<html>"), 502, "502 Bad Gateway"),
        (http_answer("413 Payload Too Large", "application/json", r#"{"detail":"Too big."}"#), 413, "Too big."),
        (
            "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:9/\r\nconnection: close\r\n\r\n".into(),
            307,
            "http://127.0.0.1:9,",
        ),
        (
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{".into(),
            502,
            "may have been carried out",
        ),
        (String::new(), 502, "may have been carried out"),
    ];
    let (url, _requests) = stub(cases.iter().map(|(answer, ..)| answer.clone()).collect()).await;
    let mut shim = Shim::start(&["--url", &url]);
    for (answer, code, says) in cases {
        shim.request("7", "tools/call", "{}").await;
        if answer.contains("progress") {
            assert_eq!(shim.line().await, r#"{"method":"notifications/progress", "params":{}}"#);
        }
        let (id, got, message) = shim.refusal().await;
        assert_eq!((id, got), (json!(7), json!(code)), "{message}");
        assert!(message.contains(says), "{says}: {message}");
    }
}

#[tokio::test]
async fn text_arrives_as_it_was_written() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    let mut shim = Shim::of(&server, &app);
    let value =
        "{\"n\":[1E2,1.0,9007199254740993,-0.0],\"s\":\"\u{1f980}\u{2028}\u{2029}\\u2028\\/é\",\"z\":1,\"a\":2}";
    shim.request("1e0", "tools/call", &format!(r#"{{"name":"echo","arguments":{value}}}"#)).await;
    let frame = bridge.recv_text().await;
    assert!(frame.contains(value), "{frame}");
    let request_id = serde_json::from_str::<Value>(&frame).unwrap()["request_id"].as_str().unwrap().to_owned();
    // Line ends between tokens would end the line.
    let pretty = value.replace(",\"z\"", ",\r\n\"z\"");
    bridge.answer(&request_id, &format!(r#""ok":true,"content":{pretty}"#)).await;
    let line = shim.line().await;
    assert!(line.contains(r#""id":1e0"#), "{line}");
    assert!(line.contains(&value.replace(",\"z\"", ",  \"z\"")), "{line}");
}

#[tokio::test]
async fn a_restart_of_the_proxy_is_survived() {
    let server = TestServer::start(&[]).await;
    let (port, app) = (server.port, App::register(&server).await);
    let args = ["--proxy-base-url", &server.base, "--session-id", &app.id, "--log", "openclaw_mcp_proxy=debug"];
    let mut shim = Shim::start(&args);
    shim.send(&initialize("1", "")).await;
    shim.answer().await;
    server.stopped().await;
    // Nobody listens now: this waits.
    shim.request("2", "ping", "{}").await;
    shim.logged("trying again").await;
    let server = TestServer::start_on(port, &[]).await;
    // It got through; the old session is gone, and a new one can be named.
    assert_eq!(shim.refusal().await.1, 404);
    let app = App::register(&server).await;
    shim.send(&initialize("4", &format!(r#","mcpSessionId":"{}""#, app.id))).await;
    shim.answer().await;
    shim.request("5", "tools/list", "{}").await;
    assert_eq!(shim.answer().await["result"]["tools"][0]["name"], "echo");
}

/// A session with a tool whose argument `region` is repeated in a header.
async fn app_with_header(server: &TestServer) -> App {
    let schema =
        json!({ "type": "object", "properties": { "region": { "type": "string", "x-mcp-header": "Region" } } });
    let tools = json!([{ "name": "t", "description": "A tool.", "input_schema": schema }]);
    App::register_with(server, json!({ "device_id": "d", "tools": tools })).await
}

#[tokio::test]
async fn modern_calls_carry_their_headers_even_if_no_list_went_by() {
    let server = TestServer::start(&[]).await;
    let app = app_with_header(&server).await;
    app.connect().await.echo();
    let call = r#","name":"t","arguments":{"region":"世"}"#;
    for lists_first in [true, false] {
        let mut shim = Shim::of(&server, &app);
        shim.modern("0", "server/discover", "").await;
        assert!(shim.answer().await["result"]["supportedVersions"].is_array());
        if lists_first {
            shim.modern("1", "tools/list", "").await;
            assert_eq!(shim.answer().await["result"]["tools"][0]["name"], "t");
        }
        // The proxy refuses calls without the right headers.
        shim.modern("2", "tools/call", call).await;
        assert_eq!(shim.answer().await["result"]["structuredContent"], json!({ "region": "世" }));
    }
}

#[tokio::test]
async fn a_call_whose_headers_are_refused_is_made_once_more() {
    let refused = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32020,"message":"No."}}"#;
    let refused = || http_answer("400 Bad Request", "application/json", refused);
    let list = r#"{"id":"openclaw-mcp-stdio","result":{"tools":[{"name":"ä","inputSchema":{"properties":{"n":{"type":"integer","x-mcp-header":"N"}}}}]}}"#;
    let list = http_answer("200 OK", "text/event-stream", &format!("data: {list}\n\n"));
    let (url, mut requests) = stub(vec![refused(), list, refused()]).await;
    let mut shim = Shim::start(&["--url", &url]);
    shim.modern("1", "tools/call", r#","name":"ä","arguments":{"n":42.0}"#).await;
    assert_eq!(shim.refusal().await, (json!(1), json!(-32020), "No.".to_owned()));
    let mut headers = async |names: [&str; 4]| {
        let request = soon(requests.recv()).await.unwrap();
        names.map(|name| header(&request, name).map(str::to_owned))
    };
    let names = ["mcp-protocol-version", "mcp-method", "mcp-name", "mcp-param-n"];
    let expect = |values: [Option<&str>; 4]| values.map(|value| value.map(str::to_owned));
    let name = Some("=?base64?w6Q=?=");
    assert_eq!(headers(names).await, expect([Some("2026-07-28"), Some("tools/call"), name, None]));
    assert_eq!(headers(names).await, expect([Some("2026-07-28"), Some("tools/list"), None, None]));
    assert_eq!(headers(names).await, expect([Some("2026-07-28"), Some("tools/call"), name, Some("42")]));
}

#[tokio::test]
async fn the_limit_of_requests_is_told_and_cancelling_makes_room() {
    use openclaw_mcp_proxy::stdio::{MAX_IN_FLIGHT, relay::MAX_CONCURRENT};
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut shim = Shim::start(&["--url", &format!("http://{}", listener.local_addr().unwrap())]);
    for id in 0..=MAX_IN_FLIGHT {
        shim.modern(&id.to_string(), "tools/list", "").await;
    }
    let (id, code, message) = shim.refusal().await;
    assert_eq!((id, code), (json!(MAX_IN_FLIGHT), json!(429)), "{message}");
    // None of them is ever answered.
    let mut connections = Vec::new();
    while connections.len() < MAX_CONCURRENT {
        connections.push(soon(listener.accept()).await.unwrap());
    }
    // Cancellations are taken all the same, and the next request in line gets the connection's place.
    shim.cancel("7").await;
    connections.push(soon(listener.accept()).await.unwrap());
    shim.modern("\"fits\"", "tools/list", "").await;
    shim.modern("\"does not\"", "tools/list", "").await;
    assert_eq!(shim.refusal().await.0, "does not");
}

#[cfg(unix)]
fn signal(child: &Child, signal: &str) {
    let status = std::process::Command::new("kill").args([signal, &child.id().unwrap().to_string()]).status();
    assert!(status.unwrap().success());
}

#[cfg(unix)]
#[tokio::test]
async fn a_signal_ends_it_at_once_and_cancels_what_runs() {
    let server = TestServer::start(&[]).await;
    let registration = json!({ "device_id": "d", "tools": tools(&["slow"]), "bridge_features": ["cancel"] });
    let app = App::register_with(&server, registration).await;
    let mut bridge = app.connect().await;
    for name in ["-TERM", "-INT"] {
        let mut shim = Shim::of(&server, &app);
        shim.request("1", "tools/call", r#"{"name":"slow"}"#).await;
        bridge.invoked().await;
        signal(&shim.child, name);
        let (status, took) = timed(soon(shim.child.wait())).await;
        assert!(status.unwrap().success() && took < Duration::from_secs(1), "{took:?}");
        assert_eq!(bridge.recv().await["type"], "cancel_tool");
    }
}

#[cfg(unix)]
#[tokio::test]
async fn it_is_gone_two_seconds_after_its_parent() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut bridge = app.connect().await;
    // The shell's end leaves the pipes open: the program and this test hold them.
    let mut command = Command::new("/bin/sh");
    command.args(["-c", r#"exec 3<&0; "$0" --url "$1" <&3 & wait"#, PROGRAM, &app.mcp_url]);
    let mut shim = Shim::spawn(command);
    shim.request("1", "tools/call", r#"{"name":"slow"}"#).await;
    bridge.invoked().await;
    signal(&shim.child, "-KILL");
    let killed = Instant::now();
    soon(shim.child.wait()).await.unwrap();
    // Its stdout is closed when it is gone.
    assert_eq!(shim.next_line().await, None);
    assert!(killed.elapsed() < Duration::from_secs(2), "{:?}", killed.elapsed());
}

#[tokio::test]
async fn a_client_that_closes_stdout_ends_it() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let mut shim = Shim::of(&server, &app);
    drop(shim.stdout.take());
    shim.send("{").await;
    assert!(soon(shim.child.wait()).await.unwrap().success());
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn it_starts_quickly_and_stays_small() {
    let server = TestServer::start(&[]).await;
    let app = App::register(&server).await;
    let start = Instant::now();
    let mut shim = Shim::of(&server, &app);
    shim.request("1", "tools/list", "{}").await;
    shim.answer().await;
    // A release build needs 3 ms and 5 MB.
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    let status = std::fs::read_to_string(format!("/proc/{}/status", shim.child.id().unwrap())).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kilobytes: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(kilobytes < 30_000, "{kilobytes} kB");
}
