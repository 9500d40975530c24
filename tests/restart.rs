//! The process ends and another one goes on: with the state file, no session and no URL is lost.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::program::{PROGRAM, program_by, serving};
use crate::support::{App, McpClient, http, send, soon, tools, until};

/// A folder for a state file, and the port of the proxies that use it.
struct Place {
    folder: PathBuf,
    listen: String,
}

impl Place {
    fn new() -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("restart-{}", uuid::Uuid::new_v4()));
        fs::create_dir(&folder).unwrap();
        // Free now, and asked for by nobody else in a moment.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Place { folder, listen: format!("127.0.0.1:{port}") }
    }

    fn file(&self) -> PathBuf {
        self.folder.join("state.jsonl")
    }

    fn text(&self) -> String {
        fs::read_to_string(self.file()).unwrap_or_default()
    }

    async fn start(&self, settings: &[(&str, &str)]) -> (Child, String) {
        let file = self.file();
        let own = [("LISTEN", self.listen.as_str()), ("STATE_FILE", file.to_str().unwrap())];
        serving(&[&own[..], settings].concat()).await
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.folder);
    }
}

async fn signal(child: &Child, name: &str) {
    let pid = child.id().unwrap().to_string();
    assert!(Command::new("kill").args([name, &pid]).status().await.unwrap().success());
}

async fn end(mut child: Child, name: &str) {
    signal(&child, name).await;
    soon(child.wait()).await.unwrap();
}

/// Half a megabyte of tools.
fn large(n: usize) -> Value {
    let tools: Value =
        (0..8).map(|m| json!({ "name": format!("t{n}-{m}"), "description": "x".repeat(60_000) })).collect();
    json!({ "tools": tools })
}

async fn listed(client: &McpClient) -> Value {
    client.rpc("1", "tools/list", "{}").await.json()["result"]["tools"].clone()
}

#[tokio::test]
async fn every_url_works_after_a_restart_however_the_process_ended() {
    for how in ["-TERM", "-KILL"] {
        let place = Place::new();
        let (proxy, base) = place.start(&[]).await;
        let registration = json!({
            "deviceId": "d", "device_name": "Büro \"1\"\u{2028}", "app_version": "1.2", "instructions": "a\nb",
            "bridge_features": ["resume", "tools", "cancel"], "want_session_secret": true, "want_mcp_token": true,
            "tools": [{
                "name": "echo", "title": "E", "description": "ä\t\\", "path": "x", "_meta": {"n": 1.50e3},
                "input_schema": {"type": "object", "properties": {"n": {"maximum": 1_234_567_890_123_456_789_i64}}},
                "output_schema": {"type": "object"}, "annotations": {"readOnlyHint": true},
            }],
        });
        let created = send(http().post(format!("{base}/v1/chat/sessions")).json(&registration)).await.json();
        let text = |member: &str| created[member].as_str().unwrap().to_owned();
        let (id, secret, token) = (text("mcpSessionId"), text("session_secret"), text("mcp_token"));
        let with_token = |url: &str| McpClient::new(url).header("authorization", &format!("Bearer {token}"));
        let plain = App::register_at(&base, json!({ "device_id": "p", "tools": tools(&["old"]) })).await;
        let update = json!({ "tools": tools(&["new", "newer"]) });
        assert_eq!(send(http().put(format!("{}/tools", plain.session_url())).json(&update)).await.status, 200);
        let gone = App::register_at(&base, json!({ "device_id": "gone" })).await;
        gone.delete().await;
        let mut bridge = plain.connect().await;
        let call = plain.client().spawn_call("1", "new", "{}");
        let (first_call, _, _) = bridge.invoked().await;
        bridge.answer(&first_call, r#""ok":true,"content":1"#).await;
        soon(call).await.unwrap();
        let before = (listed(&with_token(&text("mcp_url"))).await, listed(&plain.client()).await);
        // Within a second, all of it is in the file.
        until(async || place.text().contains(r#""name":"newer""#) && place.text().contains(&id)).await;
        end(proxy, how).await;

        let mode = fs::metadata(place.file()).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{how}");
        assert!(!place.text().contains(&secret) && !place.text().contains(&token), "{how}");
        let (proxy, _) = place.start(&[]).await;
        assert_eq!((listed(&with_token(&text("mcp_url"))).await, listed(&plain.client()).await), before, "{how}");
        assert_eq!(gone.status().await.status, 404, "{how}");
        // What opened a session still does, and nothing else.
        let look =
            |secret: &str| http().get(format!("{base}/v1/chat/sessions/{id}")).header("x-session-secret", secret);
        assert_eq!([send(look(&secret)).await.status, send(look("wrong")).await.status], [200, 404], "{how}");
        assert_eq!(McpClient::new(&text("mcp_url")).call("echo", "{}").await.status, 404, "{how}");
        // A new call has a number that the earlier process cannot have used.
        let mut bridge = plain.connect().await;
        let call = plain.client().spawn_call("1", "newer", "{}");
        let (second_call, _, _) = bridge.invoked().await;
        let number = |call: &str| call.rsplit(':').next().unwrap().parse::<u64>().unwrap();
        assert!(number(&second_call) > number(&first_call) + 1_000_000, "{how}: {second_call}");
        assert!(number(&second_call) < 1 << 53, "{how}: a double holds it");
        bridge.answer(&second_call, r#""ok":true,"content":2"#).await;
        assert_eq!(soon(call).await.unwrap().tool_text(), "2");
        // What is deleted now stays away.
        plain.delete().await;
        end(proxy, "-TERM").await;
        let (proxy, _) = place.start(&[]).await;
        assert_eq!(plain.status().await.status, 404, "{how}");
        assert_eq!(send(look(&secret)).await.status, 200, "{how}");
        end(proxy, "-TERM").await;
    }
}

#[tokio::test]
async fn what_cannot_be_read_is_kept_aside_and_the_rest_lives_on() {
    let place = Place::new();
    let (proxy, base) = place.start(&[]).await;
    let app = App::register_at(&base, json!({ "device_id": "d", "tools": tools(&["t"]) })).await;
    end(proxy, "-TERM").await;
    let whole = place.text();
    fs::write(place.file(), format!("{whole}nonsense\n{whole}")).unwrap();
    let (proxy, _) = place.start(&[]).await;
    assert_eq!(app.status().await.status, 200);
    end(proxy, "-TERM").await;
    assert!(fs::read_to_string(place.folder.join("state.jsonl.bad")).unwrap().contains("nonsense"));
    assert_eq!(place.text(), whole);
    // A line that was being written when the process died is no fault.
    fs::remove_file(place.folder.join("state.jsonl.bad")).unwrap();
    fs::write(place.file(), format!("{whole}{}", &whole[..whole.len() / 2])).unwrap();
    let (proxy, _) = place.start(&[]).await;
    assert_eq!(app.status().await.status, 200);
    assert!(!place.folder.join("state.jsonl.bad").exists());
    end(proxy, "-TERM").await;
}

#[tokio::test]
async fn sessions_end_while_nobody_runs_when_their_time_is_over_or_their_tenant_is_gone() {
    let place = Place::new();
    let tenants = place.folder.join("tenants.toml");
    let hash = |token: &str| {
        use sha2::Digest;
        sha2::Sha256::digest(token).iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    let tenant = |name: &str| format!("[[tenant]]\nname = \"{name}\"\napp_token_sha256 = [\"{}\"]\n", hash(name));
    fs::write(&tenants, tenant("alice") + &tenant("bob")).unwrap();
    let settings = [("TENANTS_FILE", tenants.to_str().unwrap())];
    let (proxy, base) = place.start(&settings).await;
    let register = async |name: &str| App::register_at_as(&base, json!({ "device_id": "d" }), name).await;
    let (alices, bobs) = (register("alice").await, register("bob").await);
    let status = async |app: &App, name: &str| send(http().get(app.session_url()).bearer_auth(name)).await.status;
    end(proxy, "-TERM").await;
    fs::write(&tenants, tenant("bob")).unwrap();
    let (proxy, _) = place.start(&settings).await;
    assert_eq!(status(&bobs, "bob").await, 200);
    end(proxy, "-TERM").await;
    assert!(!place.text().contains(&alices.id) && place.text().contains(&bobs.id));
    let old = std::time::SystemTime::now() - Duration::from_secs(301);
    fs::File::options().write(true).open(place.file()).unwrap().set_modified(old).unwrap();
    let (proxy, _) = place.start(&settings).await;
    assert_eq!(status(&bobs, "bob").await, 404);
    end(proxy, "-TERM").await;
}

#[tokio::test]
async fn two_proxies_do_not_share_a_file_and_an_unusable_one_is_a_sentence() {
    let place = Place::new();
    let (proxy, _) = place.start(&[]).await;
    let starting = async |file: &str| {
        let settings = [("LISTEN", "127.0.0.1:0"), ("STATE_FILE", file)];
        let output = soon(program_by(Command::new(PROGRAM), &settings).output()).await.unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let second = starting(place.file().to_str().unwrap()).await;
    assert!(second.contains("is in use by another proxy"), "{second}");
    let missing = starting(place.folder.join("missing/state").to_str().unwrap()).await;
    assert!(missing.contains("OPENCLAW_PROXY_STATE_FILE"), "{missing}");
    end(proxy, "-TERM").await;
}

#[tokio::test]
async fn the_file_does_not_grow_with_what_has_been() {
    let place = Place::new();
    let (proxy, base) = place.start(&[]).await;
    let app = App::register_at(&base, json!({ "device_id": "d", "tools": tools(&["t"]) })).await;
    let size = || fs::metadata(place.file()).map_or(0, |file| file.len());
    let mut largest = 0;
    for n in 0..10 {
        assert_eq!(send(http().put(format!("{}/tools", app.session_url())).json(&large(n))).await.status, 200);
        until(async || place.text().contains(&format!(r#""name":"t{n}-7""#))).await;
        largest = largest.max(size());
    }
    // Twice what is alive, and a mebibyte.
    assert!(largest > 1_000_000 && largest < 2_100_000, "{largest}");
    end(proxy, "-TERM").await;
}

#[tokio::test]
async fn a_disk_that_takes_nothing_is_told_and_made_up_for() {
    let place = Place::new();
    let admin = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (proxy, base) = place.start(&[("ADMIN_LISTEN", &admin)]).await;
    let errors = async || {
        let text = send(http().get(format!("http://{admin}/metrics"))).await.text;
        let line = text.lines().find(|line| line.starts_with("openclaw_proxy_state_file_errors_total")).unwrap();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(errors().await, 0);
    // A folder where the next file is to be written: not even root can.
    fs::create_dir(place.folder.join("state.jsonl.new")).unwrap();
    let app = App::register_at(&base, json!({ "device_id": "d", "tools": tools(&["t"]) })).await;
    for n in 0..10 {
        if errors().await > 0 {
            break;
        }
        assert_eq!(send(http().put(format!("{}/tools", app.session_url())).json(&large(n))).await.status, 200);
        until(async || errors().await > 0 || place.text().contains(&format!(r#""name":"t{n}-7""#))).await;
    }
    assert!(errors().await > 0);
    let late = App::register_at(&base, json!({ "device_id": "late" })).await;
    fs::remove_dir(place.folder.join("state.jsonl.new")).unwrap();
    until(async || place.text().contains(&late.id)).await;
    end(proxy, "-KILL").await;
    let (proxy, _) = place.start(&[]).await;
    assert_eq!([late.status().await.status, app.status().await.status], [200, 200]);
    end(proxy, "-TERM").await;
}

/// Calls come at 200 a second, each takes its app 50 ms, and the proxy is told to stop: what an app was given to do,
/// its client hears of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_under_load_loses_no_call() {
    let (proxy, base) = serving(&[("LISTEN", "127.0.0.1:0")]).await;
    let executed: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let mut clients = Vec::new();
    for n in 0..10 {
        let app = App::register_at(&base, json!({ "device_id": n.to_string(), "tools": tools(&["t"]) })).await;
        let bridge = app.connect().await;
        let executed = Arc::clone(&executed);
        clients.push(app.client());
        tokio::spawn(async move {
            use futures_util::{SinkExt, StreamExt};
            let (mut sink, mut stream) = bridge.socket.split();
            let (answers, mut ready) = tokio::sync::mpsc::channel(1000);
            tokio::spawn(async move {
                while let Some(answer) = ready.recv().await {
                    let _gone = sink.send(answer).await;
                }
            });
            while let Some(Ok(message)) = stream.next().await {
                let Ok(frame) = serde_json::from_str::<Value>(message.to_text().unwrap_or_default()) else { continue };
                if frame["type"] != "invoke_tool" {
                    continue;
                }
                let mark = frame["arguments"]["mark"].as_str().unwrap().to_owned();
                executed.lock().unwrap().insert(mark.clone());
                let answer =
                    json!({ "type": "invoke_result", "request_id": frame["request_id"], "ok": true, "content": mark });
                let answers = answers.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    let _gone = answers.send(tokio_tungstenite::tungstenite::Message::text(answer.to_string())).await;
                });
            }
        });
    }
    let (answered, refused) = (Arc::new(Mutex::new(BTreeSet::new())), Arc::new(AtomicUsize::new(0)));
    let mut calls = tokio::task::JoinSet::new();
    let mut ticks = tokio::time::interval(Duration::from_millis(5));
    for n in 0..400 {
        ticks.tick().await;
        if n == 200 {
            signal(&proxy, "-TERM").await;
        }
        let (client, answered, refused) = (clients[n % 10].clone(), Arc::clone(&answered), Arc::clone(&refused));
        calls.spawn(async move {
            let body = json!({
                "jsonrpc": "2.0", "id": n, "method": "tools/call",
                "params": { "name": "t", "arguments": { "mark": format!("mark {n}") } },
            });
            let Ok(response) = client.request(body.to_string()).send().await else {
                return refused.fetch_add(1, Ordering::Relaxed);
            };
            let answer: Value =
                serde_json::from_str(&response.text().await.expect("an answer that begins, ends")).unwrap();
            match answer["result"]["isError"] == true {
                true => refused.fetch_add(1, Ordering::Relaxed),
                false => {
                    answered
                        .lock()
                        .unwrap()
                        .insert(answer["result"]["content"][0]["text"].as_str().unwrap().to_owned());
                    0
                }
            }
        });
    }
    soon(async { while calls.join_next().await.is_some_and(|call| call.is_ok()) {} }).await;
    let (executed, answered) = (executed.lock().unwrap().clone(), answered.lock().unwrap().clone());
    assert_eq!(executed, answered, "executed, and answered");
    assert!(answered.len() >= 190, "{}", answered.len());
    assert_eq!(answered.len() + refused.load(Ordering::Relaxed), 400);
}
