//! OpenClaw MCP Proxy: lends an app's tools to OpenClaw, and to any other MCP client.
//!
//! An *app* registers a *session* with its tools and dials out over a WebSocket, its *bridge*. MCP clients list and
//! call those tools at the session's HTTP endpoint. A *call* travels over the bridge as `invoke_tool` and comes
//! back as `invoke_result`. What is relayed (ids, arguments, schemas, results) stays the text that was sent.
//!
//! # Where things are
//!
//! | module | what it is |
//! |---|---|
//! | [`json`] | checks and slices JSON text in one pass; escapes and pretty-prints |
//! | [`jsonrpc`] | the JSON-RPC envelope, borrowed from the body |
//! | [`cancel`] | which request a `notifications/cancelled` means |
//! | [`mcp`] | the MCP server without a socket: which method, which version |
//! | [`mcp::headers`], [`mcp::schema`] | what 2026-07-28 clients repeat in headers, and which arguments |
//! | [`mcp::result`] | from an app's answer to what a client of a given version takes |
//! | [`mcp::stream`], [`mcp::listen`] | event streams: of a call that runs, and of changes of the tools |
//! | [`protocol`] | app ⇄ proxy on the wire: session ids, bridge frames, close codes |
//! | [`auth`] | bearer tokens and their only comparison |
//! | [`process`], [`process::systemd`] | the version, logging, signals; what systemd hears |
//! | [`http_client`] | one HTTP request of a program to a server |
//! | [`proxy`] | the server: connections, shutdown, shared state |
//! | [`proxy::config`] | every setting, from the environment |
//! | [`proxy::start`] | what can be wrong before it serves, in words; `check-config` |
//! | [`proxy::listener`] | where it listens: TCP, a Unix socket, what systemd passes on |
//! | [`proxy::routes`] | every route |
//! | [`proxy::gate`] | Host, Origin and doubled headers; the public base URL |
//! | [`proxy::api`] | what apps call: sessions and the bridge's upgrade |
//! | [`proxy::mcp`] | what MCP clients call: `/v1/mcp` |
//! | [`process::audit`], [`process::file`] | the audit log's file and its writer; opening files that operators name |
//! | [`proxy::tenants`], [`proxy::memory`] | whose a token is, and how much each may take; bytes in memory |
//! | [`proxy::rates`], [`proxy::audit`], [`proxy::refusals`] | how many requests a second; who did what, as lines; who was refused, in a few |
//! | [`proxy::records`], [`proxy::metrics`] | where everything that happens is told; the counts of it |
//! | [`proxy::trace`], [`proxy::trace::context`] | a call's spans; where it comes from |
//! | [`proxy::trace::settings`], [`proxy::trace::export`] | OpenTelemetry's variables; what sends spans to a collector |
//! | [`proxy::state_file`] | sessions that outlive the process |
//! | [`proxy::admin`] | what the operator sees: status page, numbers, readiness |
//! | [`proxy::session`] | a registration, checked and rendered |
//! | [`proxy::registry`] | which sessions there are; expiry |
//! | [`proxy::bridge`] | a session's calls in flight: a state machine without a socket; its books in `state` |
//! | [`proxy::bridge::socket`] | the one task that owns a bridge's WebSocket |
//! | [`proxy::connection`] | a client connection's clocks |
//! | [`proxy::body`], [`proxy::error`], [`proxy::cors`] | reading bodies within bounds; errors; invited web pages |
//! | [`stdio`] | the program for MCP clients that can only start a process |
//! | [`node`], [`node::capabilities`] | what a desktop lends: the list of its capabilities |
//! | [`node::capabilities::system`], [`node::capabilities::device`] | `system.*` and `device.*` |
//! | [`node::capabilities::canvas`] | `canvas.*`: a browser of our own, and the A2UI surfaces that it draws |
//! | [`node::capabilities::screen`], [`node::capabilities::camera`], [`node::capabilities::media`] | pictures and videos |
//! | [`node::capabilities::tts`], [`node::capabilities::stt`] | speaking and listening |
//! | [`node::capabilities::location`], [`node::capabilities::browser`] | where this is; a browser-control host |
//! | [`node::capabilities::app`], [`node::status`] | the node about itself; how its transports are |
//! | [`node::capabilities::program`] | programs that capabilities start |
//! | [`node::capabilities::exec`], [`node::capabilities::exec::request`] | running a program; what a call asks for |
//! | [`node::approvals`], [`node::approvals::policy`] | which programs may be run; the owner's policy |
//! | [`node::approvals::cli`] | the owner's commands for it |
//! | [`node::approvals::location`], [`node::approvals::store`] | where it is kept; reading and changing it |
//! | [`node::approvals::disk`] | a file that nobody else can have put there |
//! | [`node::approvals::executable`], [`node::approvals::matcher`] | which program is meant; whether it is listed |
//! | [`node::approvals::evaluate`], [`node::approvals::update`] | what follows; what a client may change |
//! | [`node::local_mcp`] | the MCP server for clients on the same machine: gates, and one request each |
//! | [`node::local_mcp::dispatch`], [`node::local_mcp::calls`] | its messages, and its calls in flight |
//! | [`node::bridge_client`] | the app's end of a bridge, for any lender; when it comes back is [`node::backoff`]'s |
//! | [`node::bridge_client::calls`], [`node::bridge_client::frames`] | its calls, without a socket; its frames |
//! | [`node::serve`], [`node::lender`] | both transports over one registry; the registry as a lender, and what of it is lent |
//! | [`node::wire`], [`node::announce`] | tools and results as MCP has them; a session as its user reads of it |
//! | [`node::settings`], [`node::private_file`] | what is switched on; files for their owner alone |
//! | [`node::lend`], [`node::upstream`] | lending an MCP server that already exists; that server as a lender |
//! | [`node::upstream::http`], [`node::filter`] | how it is reached by HTTP; which of its tools are lent |
//! | [`node::descriptions`] | what clients read about each command |
//! | [`node::token`] | the file with the token of the local MCP server |
//! | [`winnode`], [`winnode::args`], [`winnode::access`] | the command line for one call of the local MCP server |
//! | [`winnode::sanitize`] | a server's words made safe to print |
//! | [`demo`] | an app and a client that show the whole way |
//! | [`doctor`] | a look at a deployment from outside: what is wrong, and which line mends it |
//!
//! The programs in `src/bin` only read flags and end with a code. `build.rs` finds out the commit. `tests/main.rs` lists the tests; `tests/clients`
//! holds the real clients and the sample apps; `tests/run` installs what they need. `tests/windows.sh` tests what is built
//! for Windows.
//!
//! Imports point down: `bin → winnode, doctor → proxy, stdio, node, demo → mcp → jsonrpc, cancel, protocol, auth, process, http_client → json`.
//! [`proxy`], [`stdio`] and [`node`] do not know each other; [`winnode`] finds the token where [`node`] keeps it, and
//! [`doctor`] reads bridge frames as [`node`] does.
//!
//! # The walk of one tools/call
//!
//! `POST /v1/mcp/{id}` → [`proxy::routes`] → [`proxy::mcp`] checks gate and token, reads the body, finds the session
//! → [`jsonrpc`] parses it once → [`mcp::dispatch`] decides the era and checks headers → `Tools::call` →
//! [`proxy::bridge::Bridge::call`] gives it a number and queues `invoke_tool` → the socket task sends it → the app
//! → the socket task reads `invoke_result` and hands it to [`proxy::bridge::Bridge::receive`] → the waiting request
//! gets the reply → [`mcp::result`] shapes it for the client's version → JSON, or the last event of a stream.
//!
//! # Who owns what
//!
//! [`proxy::Server`] owns the listener, the sweeper and every connection; `ProxyState` holds the settings, the
//! tenants and the [`proxy::registry::Registry`]; an entry of it is a [`proxy::session::Session`] (data, replaced as
//! a whole) and a [`proxy::bridge::Bridge`] (live, behind a mutex that is never held across an await). A bridge's
//! socket is owned by one task; when that ends for any reason, the calls it held end at once.

pub mod auth;
pub mod cancel;
pub mod demo;
pub mod doctor;
pub mod http_client;
pub mod json;
pub mod jsonrpc;
pub mod mcp;
pub mod node;
pub mod process;
pub mod protocol;
pub mod proxy;
pub mod stdio;
pub mod winnode;
