//! What a proxy cannot do without, as servers to measure it against.
//!
//! `echo` takes a request and answers it: HTTP alone. `hop` finds the session, passes the body to its app over a
//! WebSocket, and answers with what comes back, in order and without looking at any of it: HTTP and the bridge, and no
//! JSON, tokens, limits or deadlines. Both use the libraries that the proxy uses, in the same way.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use bytes::{BufMut, Bytes, BytesMut};
use clap::{Parser, ValueEnum};
use dashmap::DashMap;
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, UPGRADE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_websockets::{Limits, Message, ServerBuilder};

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Kind {
    Echo,
    Hop,
}

/// A server that does the least.
#[derive(Parser)]
struct Cli {
    kind: Kind,
    /// The port on 127.0.0.1.
    #[arg(long)]
    port: u16,
    /// Threads; 0 is one without work stealing.
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// How many bytes `echo` answers with.
    #[arg(long, default_value_t = 400)]
    answer_bytes: usize,
}

/// A body on its way to the app, and where the answer goes.
type Call = (Bytes, oneshot::Sender<Bytes>);

struct Floor {
    kind: Kind,
    answer: Bytes,
    sessions: DashMap<String, mpsc::Sender<Call>>,
    count: AtomicU64,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let mut builder = match cli.workers {
        0 => tokio::runtime::Builder::new_current_thread(),
        workers => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(workers);
            builder
        }
    };
    builder.enable_all().build()?.block_on(async {
        let listener = TcpListener::bind(("127.0.0.1", cli.port)).await?;
        // On a worker, like everything else.
        tokio::spawn(serve(listener, cli)).await?
    })
}

async fn serve(listener: TcpListener, cli: Cli) -> Result<()> {
    let floor = Arc::new(Floor {
        kind: cli.kind,
        answer: Bytes::from(format!("\"{}\"", "x".repeat(cli.answer_bytes.saturating_sub(2)))),
        sessions: DashMap::new(),
        count: AtomicU64::new(0),
    });
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let floor = Arc::clone(&floor);
        tokio::spawn(async move {
            let service = service_fn(|request| answer(Arc::clone(&floor), request));
            let connection = hyper::server::conn::http1::Builder::new()
                .header_read_timeout(None)
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades();
            // A client that goes is no news.
            let _ended = connection.await;
        });
    }
}

async fn answer(floor: Arc<Floor>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let answered = if request.uri().path().starts_with("/v1/mcp/") {
        call(&floor, request).await
    } else if request.method() == Method::GET && request.uri().path().ends_with("/bridge") {
        bridge(floor, request)
    } else {
        register(&floor, request).await
    };
    Ok(answered.unwrap_or_else(|error| {
        let mut response = Response::new(Full::from(error.to_string()));
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response
    }))
}

async fn call(floor: &Floor, request: Request<Incoming>) -> Result<Response<Full<Bytes>>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let answer = match floor.kind {
        Kind::Echo => floor.answer.clone(),
        Kind::Hop => {
            let id = parts.uri.path().trim_start_matches("/v1/mcp/");
            let queue = floor.sessions.get(id).context("no such session")?.clone();
            let (reply, replied) = oneshot::channel();
            queue.send((body, reply)).await?;
            replied.await?
        }
    };
    let mut response = Response::new(Full::new(answer));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

async fn register(floor: &Floor, request: Request<Incoming>) -> Result<Response<Full<Bytes>>> {
    let is_new = request.method() == Method::POST;
    request.into_body().collect().await?;
    let id = floor.count.fetch_add(u64::from(is_new), Ordering::Relaxed);
    Ok(Response::new(Full::from(format!(r#"{{"mcpSessionId":"{id:032x}"}}"#))))
}

fn bridge(floor: Arc<Floor>, mut request: Request<Incoming>) -> Result<Response<Full<Bytes>>> {
    let id = request.uri().path().split('/').nth(4).context("no session")?.to_owned();
    let key = request.headers().get(SEC_WEBSOCKET_KEY).context("no WebSocket")?;
    let accept = derive_accept_key(key.as_bytes());
    let upgrade = hyper::upgrade::on(&mut request);
    let (queue, calls) = mpsc::channel(1024);
    floor.sessions.insert(id.clone(), queue);
    tokio::spawn(async move {
        // An app that goes is no news.
        let _gone = pump(upgrade, calls).await;
        floor.sessions.remove(&id);
    });
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, accept.parse()?);
    Ok(response)
}

/// Passes bodies on and answers back, in order, until the app goes.
async fn pump(upgrade: hyper::upgrade::OnUpgrade, mut calls: mpsc::Receiver<Call>) -> Result<()> {
    let parts = upgrade.await?.downcast::<TokioIo<TcpStream>>().map_err(|_| anyhow::anyhow!("another connection"))?;
    let limits = Limits::default().max_payload_len(None);
    let (mut sink, mut stream) = ServerBuilder::new().limits(limits).serve(parts.io.into_inner()).split();
    let waiting: Mutex<VecDeque<oneshot::Sender<Bytes>>> = Mutex::default();
    let take = || waiting.lock().unwrap_or_else(PoisonError::into_inner);
    // Both at once: an app that writes does not read, and must not be waited for.
    let write = async {
        while let Some(call) = calls.recv().await {
            let mut next = Some(call);
            while let Some((body, reply)) = next {
                take().push_back(reply);
                sink.feed(frame(&body)).await?;
                next = calls.try_recv().ok();
            }
            sink.flush().await?;
        }
        anyhow::Ok(())
    };
    let read = async {
        while let Some(message) = stream.next().await {
            let message = message?;
            if message.is_text()
                && let Some(reply) = take().pop_front()
            {
                // A caller may have gone.
                let _gone = reply.send(message.into_payload().into());
            }
        }
        anyhow::Ok(())
    };
    tokio::select! {
        ended = write => ended,
        ended = read => ended,
    }
}

/// What the app takes for a call whose arguments are the body.
fn frame(body: &[u8]) -> Message {
    const HEAD: &[u8] =
        br#"{"type":"invoke_tool","mcpSessionId":"0","request_id":"0:1","tool_name":"echo","arguments":"#;
    let mut frame = BytesMut::with_capacity(HEAD.len() + body.len() + 1);
    frame.put_slice(HEAD);
    frame.put_slice(body);
    frame.put_u8(b'}');
    Message::text(frame.freeze())
}
