//! One request: a kept-alive HTTP/1.1 client that never follows a redirect, never uses a proxy of the environment, and
//! repeats only what was certainly not sent.
//!
//! Redirects are not followed because the session's header and the token would go along to another host.

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Builder, Client, ResponseFuture};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::Instant;

/// How long a request may wait for a server that cannot be connected to, as while it restarts.
pub const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// The pause after the first attempt to connect; each one after it is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection is kept for the next request: less than common servers and reverse proxies keep it, so
/// that no request runs into its closing.
const POOL_IDLE: Duration = Duration::from_secs(30);
/// When a silent connection is probed, to find out that its other end is gone.
const TCP_KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long an answer may be silent. The proxy sends a sign of life every few seconds.
pub const SILENCE: Duration = Duration::from_secs(300);

/// Why a request has no answer, or no whole one.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// No connection was made: nothing was sent.
    #[error("cannot be reached: {0}")]
    Unreachable(String),
    /// The connection broke: the request may have been carried out.
    #[error("closed the connection before its answer was complete ({0}); the request may have been carried out")]
    Broken(String),
    /// Nothing came for [`SILENCE`].
    #[error("sent nothing for {} seconds; the request may have been carried out", SILENCE.as_secs())]
    Silent,
    /// The body is larger than allowed.
    #[error("sent an answer of more than {0} bytes, which is the limit")]
    TooLarge(usize),
}

/// A client with its connections.
#[derive(Debug, Clone)]
pub enum HttpClient {
    /// For `http://`.
    Plain(Client<HttpConnector, Full<Bytes>>),
    /// For `https://`.
    Tls(Client<HttpsConnector<HttpConnector>, Full<Bytes>>),
}

impl HttpClient {
    /// A client for URLs like `uri`. Certificates are only loaded if it needs them.
    ///
    /// # Errors
    /// A sentence, if the system's certificates cannot be used.
    pub fn new(uri: &Uri) -> Result<Self, String> {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_keepalive(Some(TCP_KEEP_ALIVE));
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(POOL_IDLE);
        if uri.scheme_str() != Some("https") {
            return Ok(HttpClient::Plain(builder.build(connector)));
        }
        connector.enforce_http(false);
        Self::with_tls(&builder, connector)
    }

    fn with_tls(builder: &Builder, connector: HttpConnector) -> Result<Self, String> {
        let provider = rustls::crypto::ring::default_provider();
        let tls = HttpsConnectorBuilder::new()
            .with_provider_and_platform_verifier(provider)
            .map_err(|error| format!("The system's certificates cannot be used: {error}."))?;
        Ok(HttpClient::Tls(builder.build(tls.https_only().enable_http1().wrap_connector(connector))))
    }

    /// Posts `body`. While no connection can be made, it is tried again for [`CONNECT_PATIENCE`].
    ///
    /// # Errors
    /// [`HttpError`] if no answer begins.
    pub async fn post(&self, uri: &Uri, headers: &HeaderMap, body: Bytes) -> Result<Response<Incoming>, HttpError> {
        self.send(Method::POST, uri, headers, body, CONNECT_PATIENCE).await
    }

    /// Sends a request. While no connection can be made, it is tried again for as long as `patience`.
    ///
    /// # Errors
    /// [`HttpError`] if no answer begins.
    pub async fn send(
        &self,
        method: Method,
        uri: &Uri,
        headers: &HeaderMap,
        body: Bytes,
        patience: Duration,
    ) -> Result<Response<Incoming>, HttpError> {
        let end = Instant::now() + patience;
        let mut pause = FIRST_PAUSE;
        loop {
            match tokio::time::timeout(SILENCE, self.attempt(&method, uri, headers, body.clone())).await {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(error)) if !error.is_connect() => return Err(HttpError::Broken(root_cause(&error))),
                Ok(Err(error)) if is_permanent(&error) || Instant::now() + pause > end => {
                    return Err(HttpError::Unreachable(root_cause(&error)));
                }
                Ok(Err(error)) => tracing::debug!(error = root_cause(&error), "cannot connect; trying again"),
                Err(_) => return Err(HttpError::Silent),
            }
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    /// Posts `body`, and tries only once. How long it may take is the caller's affair.
    ///
    /// # Errors
    /// [`HttpError`] if no answer begins.
    pub async fn post_once(
        &self,
        uri: &Uri,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Response<Incoming>, HttpError> {
        self.attempt(&Method::POST, uri, headers, body).await.map_err(|error| match error.is_connect() {
            true => HttpError::Unreachable(root_cause(&error)),
            false => HttpError::Broken(root_cause(&error)),
        })
    }

    fn attempt(&self, method: &Method, uri: &Uri, headers: &HeaderMap, body: Bytes) -> ResponseFuture {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method.clone();
        *request.uri_mut() = uri.clone();
        *request.headers_mut() = headers.clone();
        match self {
            HttpClient::Plain(client) => client.request(request),
            HttpClient::Tls(client) => client.request(request),
        }
    }
}

/// The next piece of a body; `None` at its end.
///
/// # Errors
/// [`HttpError`] if the body breaks off or is silent for too long.
pub async fn next_chunk(body: &mut Incoming) -> Result<Option<Bytes>, HttpError> {
    loop {
        match tokio::time::timeout(SILENCE, body.frame()).await {
            Ok(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
            Ok(Some(Err(error))) => return Err(HttpError::Broken(root_cause(&error))),
            Ok(None) => return Ok(None),
            Err(_) => return Err(HttpError::Silent),
        }
    }
}

/// A whole body of at most `limit` bytes.
///
/// # Errors
/// [`HttpError`] if it does not come whole.
pub async fn read(mut body: Incoming, limit: usize) -> Result<Vec<u8>, HttpError> {
    let mut whole = Vec::new();
    while let Some(chunk) = next_chunk(&mut body).await? {
        if whole.len() + chunk.len() > limit {
            return Err(HttpError::TooLarge(limit));
        }
        whole.extend_from_slice(&chunk);
    }
    Ok(whole)
}

/// What lies beneath an error: the outer ones only say that there was one.
fn root_cause(error: &(dyn Error + 'static)) -> String {
    chain(error).last().map_or_else(String::new, ToString::to_string)
}

/// A server whose certificate is refused now will not be trusted a moment later.
fn is_permanent(error: &(dyn Error + 'static)) -> bool {
    chain(error).any(|cause| cause.is::<rustls::Error>())
}

/// An error and what lies beneath it. I/O errors wrap others without giving them as their source.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| {
        let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        wrapped.map(|wrapped| wrapped as &(dyn Error + 'static)).or_else(|| error.source())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[tokio::test(start_paused = true)]
    async fn a_server_that_cannot_be_connected_to_is_given_up_after_a_while() {
        // Once the listener is gone, nobody listens on its port.
        let address = io::Result::and_then(std::net::TcpListener::bind("127.0.0.1:0"), |l| l.local_addr()).unwrap();
        let uri: Uri = format!("http://{address}/").parse().unwrap();
        let start = Instant::now();
        let error = HttpClient::new(&uri).unwrap().post(&uri, &HeaderMap::new(), Bytes::new()).await.unwrap_err();
        assert!(matches!(error, HttpError::Unreachable(_)), "{error}");
        let patience = CONNECT_PATIENCE - LONGEST_PAUSE..=CONNECT_PATIENCE + CONNECT_TIMEOUT;
        assert!(patience.contains(&start.elapsed()), "{:?}", start.elapsed());
    }

    #[test]
    fn a_refused_certificate_is_found_beneath_other_errors() {
        let refused = rustls::Error::General("no".into());
        let wrapped = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, refused));
        assert!(is_permanent(&wrapped));
        assert_eq!(root_cause(&wrapped), "unexpected error: no");
        assert!(!is_permanent(&io::Error::from(io::ErrorKind::ConnectionRefused)));
    }
}
