//! `browser.proxy`, with a browser-control host on a real socket.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use openclaw_mcp_proxy::auth::Token;
use openclaw_mcp_proxy::node::capabilities::browser::{BrowserProxy, Host};
use openclaw_mcp_proxy::node::capabilities::{Args, Capability, Request, Response};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::{soon, until};

/// What a host was asked.
type Asked = Arc<Mutex<Vec<(Method, String, HeaderMap, Bytes)>>>;

struct Control {
    port: u16,
    asked: Asked,
    /// Where it puts its files.
    root: PathBuf,
}

impl Control {
    async fn start(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("openclaw-browser-{name}-{}", std::process::id()));
        std::fs::create_dir_all(root.join("files")).unwrap();
        let asked = Asked::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let host = (Arc::clone(&asked), root.clone());
        // Ends with the test's runtime.
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (asked, root) = host.clone();
                let service = service_fn(move |request| answer(Arc::clone(&asked), root.clone(), request));
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Control { port, asked, root }
    }

    fn proxy(&self, token: &str, files_dir: Option<PathBuf>) -> BrowserProxy {
        BrowserProxy::new(Some(Host { port: self.port, token: Token::new(token), files_dir }))
    }

    fn asked(&self) -> Vec<(Method, String, HeaderMap, Bytes)> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _removed = std::fs::remove_dir_all(&self.root);
    }
}

async fn answer(
    asked: Asked,
    root: PathBuf,
    request: http::Request<Incoming>,
) -> Result<http::Response<Full<Bytes>>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let authorization = head.headers.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
    // "Basic :password".
    let is_let_in = authorization == "Bearer token" || authorization == "Basic OnBhc3N3b3Jk";
    let place = |name: &str| root.join(name).display().to_string();
    let (status, text) = match head.uri.path() {
        _ if !is_let_in => (StatusCode::UNAUTHORIZED, "canary".to_owned()),
        "/json" => (StatusCode::OK, r#"{"tabs":[1]}"#.to_owned()),
        "/blank" => (StatusCode::NO_CONTENT, String::new()),
        "/text" => (StatusCode::OK, "no JSON".to_owned()),
        "/large" => (StatusCode::OK, format!("\"{}\"", "x".repeat(16 * 1024 * 1024))),
        "/complains" => (StatusCode::CONFLICT, " tab not found\n".to_owned()),
        "/mute" => (StatusCode::BAD_GATEWAY, String::new()),
        "/moved" => (StatusCode::FOUND, String::new()),
        "/files" => {
            let files = json!({ "path": place("files/a.png"), "imagePath": place("files/../files/b.txt"),
                "download": { "path": place("files/link") } });
            (StatusCode::OK, files.to_string())
        }
        "/outside" => {
            let files = json!({ "path": place("secret"), "imagePath": "../secret",
                "download": { "path": place("files/large") } });
            (StatusCode::OK, files.to_string())
        }
        _ => (StatusCode::NOT_FOUND, String::new()),
    };
    let is_stuck = head.uri.path() == "/stuck";
    asked.lock().unwrap().push((head.method, head.uri.to_string(), head.headers, body));
    if is_stuck {
        std::future::pending::<()>().await;
    }
    let response = http::Response::builder().status(status).header("location", "/json");
    Ok(response.body(Full::from(text)).unwrap())
}

async fn call(proxy: &BrowserProxy, args: Value) -> Response {
    let request = Request { command: "browser.proxy".to_owned(), args: Args::new(args), session_key: None };
    soon(proxy.execute(request, CancellationToken::new())).await
}

#[tokio::test]
async fn a_request_is_forwarded_and_its_reply_handed_on() {
    let control = Control::start("forward").await;
    let proxy = control.proxy("token", None);
    let args =
        json!({ "method": "POST", "path": "json", "query": { "a": "b c" }, "profile": "p", "body": { "x": [1] } });
    assert_eq!(call(&proxy, args).await, Response::done(json!({ "result": { "tabs": [1] } })));
    let (method, uri, headers, body) = control.asked().remove(0);
    assert_eq!((method, &*uri, &*body), (Method::POST, "/json?a=b%20c&profile=p", &br#"{"x":[1]}"#[..]));
    let header = |name: &str| headers.get(name).map(|value| value.to_str().unwrap());
    assert_eq!((header("authorization"), header("x-openclaw-password")), (Some("Bearer token"), None));
    assert_eq!(header("content-type"), Some("application/json"));
    for (path, becomes) in [
        ("/blank", Response::done(json!({ "result": null }))),
        ("/text", Response::failed("Browser control host returned invalid JSON")),
        ("/complains", Response::failed("tab not found")),
        ("/mute", Response::failed("Browser control host answered with status 502")),
        ("/moved", Response::failed("Browser control host answered with status 302")),
        ("//x", Response::failed("INVALID_REQUEST: path must be a path, not a URL")),
        (
            "/large",
            Response::failed("Browser control host sent an answer of more than 16777216 bytes, which is the limit"),
        ),
    ] {
        assert_eq!(call(&proxy, json!({ "path": path })).await, becomes, "{path}");
    }
}

#[tokio::test]
async fn a_token_that_is_refused_is_tried_once_more_as_a_password() {
    let control = Control::start("auth").await;
    let tabs = Response::done(json!({ "result": { "tabs": [1] } }));
    assert_eq!(call(&control.proxy("password", None), json!({ "path": "/json" })).await, tabs);
    let asked = control.asked();
    let with = |name: &str| -> Vec<_> {
        asked.iter().map(|(_, _, headers, _)| headers.get(name).map(|value| value.to_str().unwrap())).collect()
    };
    assert_eq!(with("authorization"), [Some("Bearer password"), Some("Basic OnBhc3N3b3Jk")]);
    assert_eq!(with("x-openclaw-password"), [None, Some("password")]);
    let wrong = control.proxy("wrong", None);
    let refused = Response::failed("Browser control host refused the token that this node has for it");
    assert_eq!(call(&wrong, json!({ "path": "/json" })).await, refused);
    assert_eq!(control.asked().len(), 2);
    assert!(!format!("{wrong:?}").contains("wrong"), "a token is in the logs");
}

#[tokio::test]
async fn files_are_only_read_in_their_folder() {
    const LIMIT: usize = 10 * 1024 * 1024;
    let control = Control::start("files").await;
    let write = |name: &str, bytes: &[u8]| std::fs::write(control.root.join(name), bytes).unwrap();
    write("secret", b"canary");
    write("files/a.png", b"picture");
    write("files/b.txt", &vec![b'x'; LIMIT]);
    write("files/large", &vec![b'x'; LIMIT + 1]);
    #[cfg(unix)]
    std::os::unix::fs::symlink(control.root.join("secret"), control.root.join("files/link")).unwrap();
    let with = control.proxy("token", Some(control.root.join("files")));
    let Response::Done { payload, images } = call(&with, json!({ "path": "/files" })).await else { panic!() };
    let files = payload["files"].as_array().unwrap();
    let types: Vec<_> = files.iter().map(|file| (&file["path"], &file["mimeType"])).collect();
    let result = &payload["result"];
    assert_eq!(types, [(&result["path"], &json!("image/png")), (&result["imagePath"], &json!("text/plain"))]);
    assert_eq!(files[0]["base64"], "cGljdHVyZQ==");
    assert_eq!((images.len(), &*images[0].mime_type, &*images[0].base64), (1, "image/png", "cGljdHVyZQ=="));
    for (proxy, path) in [(&with, "/outside"), (&control.proxy("token", None), "/files")] {
        let Response::Done { payload, images } = call(proxy, json!({ "path": path })).await else { panic!() };
        assert_eq!((payload.get("files"), images.len()), (None, 0), "{path}");
    }
}

#[tokio::test]
async fn whoever_cannot_be_asked_is_named() {
    let none = BrowserProxy::default();
    assert!(!none.is_available("browser.proxy"));
    let Response::Failed(text) = call(&none, json!({ "path": "/json" })).await else { panic!() };
    assert!(text.starts_with("Browser control is not set up on this node"), "{text}");
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let gone = BrowserProxy::new(Some(Host { port: gone, token: Token::new("canary"), files_dir: None }));
    let Response::Failed(text) = call(&gone, json!({ "path": "/json" })).await else { panic!() };
    assert!(text.starts_with("Browser control host is not reachable at 127.0.0.1:"), "{text}");
    let control = Control::start("stuck").await;
    let proxy = control.proxy("token", None);
    let late = call(&proxy, json!({ "path": "/stuck", "timeoutMs": 50 })).await;
    assert_eq!(late, Response::failed("Browser control host did not answer within 50 ms"));
    let cancel = CancellationToken::new();
    let args = Args::new(json!({ "path": "/stuck" }));
    let request = Request { command: "browser.proxy".to_owned(), args, session_key: None };
    let (cancelled, ()) = soon(async {
        tokio::join!(proxy.execute(request, cancel.clone()), async {
            until(async || control.asked.lock().unwrap().len() == 2).await;
            cancel.cancel();
        })
    })
    .await;
    assert_eq!(cancelled, Response::failed("cancelled"));
}
