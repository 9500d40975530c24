//! The lines that mend what was found, for the fronts of deploy/ and for the proxy's own settings.

use super::finding::Fix;
use super::wire::Base;

const NGINX: &str = "nginx";
const HAPROXY: &str = "HAProxy";
const CADDY: &str = "Caddy";
const SETTING: &str = "setting";
const SHELL: &str = "shell";

fn lines(lines: &[(&'static str, &str)]) -> Vec<Fix> {
    lines.iter().map(|(place, line)| (*place, (*line).to_owned())).collect()
}

/// The setting that makes all forwarded headers unnecessary.
fn public_url(base: &Base) -> Fix {
    (SETTING, format!("OPENCLAW_PROXY_PUBLIC_URL={base}"))
}

pub(super) fn dns(host: &str) -> Vec<Fix> {
    vec![("DNS", format!("{host}. A <the front's IPv4 address>"))]
}

pub(super) fn listen(base: &Base) -> Vec<Fix> {
    let port = base.port();
    if !base.is_tls() {
        return vec![(SETTING, format!("OPENCLAW_PROXY_LISTEN={}   # and the proxy must run", base.authority()))];
    }
    vec![
        (NGINX, format!("listen {port} ssl;")),
        (HAPROXY, format!("bind :{port} ssl crt /etc/haproxy/certs/")),
        (CADDY, "systemctl enable --now caddy".into()),
        (SHELL, "and let the port through the firewall".into()),
    ]
}

pub(super) fn tls() -> Vec<Fix> {
    lines(&[
        (NGINX, "listen 443 ssl; ssl_protocols TLSv1.2 TLSv1.3;"),
        (HAPROXY, "bind :443 ssl crt /etc/haproxy/certs/ ssl-min-ver TLSv1.2"),
        (CADDY, "name the site without http:// in front: Caddy then gets a certificate"),
    ])
}

pub(super) fn http11_offered() -> Vec<Fix> {
    lines(&[
        (NGINX, "listen 443 ssl;   # offers HTTP/1.1 beside HTTP/2"),
        (HAPROXY, "bind :443 ssl crt /etc/haproxy/certs/ alpn http/1.1"),
        (CADDY, "servers { protocols h1 h2 }"),
    ])
}

pub(super) fn renew(host: &str) -> Vec<Fix> {
    vec![
        (NGINX, format!("certbot renew --cert-name {host} && nginx -s reload")),
        (HAPROXY, "put the new chain and key into the file that 'crt' names, then: systemctl reload haproxy".into()),
        (CADDY, "renews by itself if ports 80 and 443 reach it: journalctl -u caddy says why it does not".into()),
    ]
}

pub(super) fn certificate_name(host: &str) -> Vec<Fix> {
    vec![
        (NGINX, format!("server_name {host};   # and ssl_certificate: one that names it (certbot -d {host})")),
        (HAPROXY, format!("bind :443 ssl crt /etc/haproxy/certs/{host}.pem")),
        (CADDY, format!("{host} {{ reverse_proxy 127.0.0.1:8000 }}")),
    ]
}

pub(super) fn chain(host: &str) -> Vec<Fix> {
    vec![
        (NGINX, format!("ssl_certificate /etc/letsencrypt/live/{host}/fullchain.pem;   # not cert.pem")),
        (HAPROXY, "the file that 'crt' names: cat fullchain.pem privkey.pem".into()),
        (CADDY, format!("{host} {{ … }}   # without 'tls internal' and 'tls <file> <file>'")),
        (
            SHELL,
            "an authority of your own: SSL_CERT_FILE=<its certificate> for this check, and for every app and client"
                .into(),
        ),
    ]
}

pub(super) fn clock() -> Vec<Fix> {
    lines(&[(SHELL, "timedatectl set-ntp true   # on the machine whose clock is wrong")])
}

pub(super) fn no_plain_http() -> Vec<Fix> {
    lines(&[
        (NGINX, "remove 'listen 80;' from the server that has proxy_pass"),
        (HAPROXY, "remove 'bind :80' from the frontend of the proxy"),
        (CADDY, "name the site without http:// and without :80"),
    ])
}

pub(super) fn upstream() -> Vec<Fix> {
    lines(&[
        (NGINX, "upstream openclaw_mcp_proxy { server 127.0.0.1:8000; }   # where OPENCLAW_PROXY_LISTEN says"),
        (HAPROXY, "server proxy 127.0.0.1:8000"),
        (CADDY, "reverse_proxy 127.0.0.1:8000"),
        (SHELL, "systemctl status openclaw-mcp-proxy; openclaw-mcp-proxy health   # on the proxy's machine"),
    ])
}

pub(super) fn path(base: &Base) -> Vec<Fix> {
    let prefix = base.prefix();
    if prefix.is_empty() {
        return lines(&[
            (NGINX, "location / { proxy_pass http://openclaw_mcp_proxy; }   # no path behind proxy_pass"),
            (HAPROXY, "default_backend openclaw_mcp_proxy   # without http-request set-path"),
            (CADDY, "reverse_proxy 127.0.0.1:8000   # without uri and rewrite"),
        ]);
    }
    vec![
        (NGINX, format!("location {prefix}/ {{ proxy_pass http://openclaw_mcp_proxy/; }}   # both end with a slash")),
        (HAPROXY, format!("http-request replace-path {prefix}(/.*) \\1")),
        (CADDY, format!("handle_path {prefix}/* {{ reverse_proxy 127.0.0.1:8000 }}")),
        public_url(base),
    ]
}

pub(super) fn redirect(base: &Base) -> Vec<Fix> {
    let mut fixes = lines(&[
        (
            NGINX,
            "remove the return 301, rewrite or redirect for /v1/; a client that has the http:// URL must be given the other one",
        ),
        (HAPROXY, "http-request redirect scheme https unless { path_beg /v1/ }"),
        (CADDY, "remove redir for /v1/*"),
    ]);
    fixes.push((
        SETTING,
        format!("OPENCLAW_PROXY_PUBLIC_URL={}", base.url("http", "").replacen("http://", "https://", 1)),
    ));
    fixes
}

pub(super) fn host(base: &Base) -> Vec<Fix> {
    vec![
        (
            NGINX,
            "proxy_set_header Host $http_host;   # in the location itself, if that has a proxy_set_header of its own"
                .into(),
        ),
        (HAPROXY, "remove 'http-request set-header Host'".into()),
        (CADDY, "remove 'header_up Host'".into()),
        public_url(base),
        (SETTING, format!("OPENCLAW_PROXY_ALLOWED_HOSTS={}   # if clients really use this name", base.host())),
    ]
}

pub(super) fn doubled(header: &str) -> Vec<Fix> {
    vec![
        (
            NGINX,
            format!("proxy_set_header {header} $http_{};   # once, and no add_header for it", header.replace('-', "_")),
        ),
        (HAPROXY, format!("http-request set-header {header} …   # instead of add-header")),
        (CADDY, format!("header_up {header} …   # instead of header_up +{header}")),
    ]
}

pub(super) fn authorization() -> Vec<Fix> {
    lines(&[
        (NGINX, "proxy_set_header Authorization $http_authorization;   # and no auth_basic"),
        (HAPROXY, "remove 'http-request del-header Authorization' and 'http-request auth'"),
        (CADDY, "remove 'header_up -Authorization' and basicauth"),
    ])
}

pub(super) fn token(name: &str, flag: &str) -> Vec<Fix> {
    vec![
        (SETTING, format!("{name}=<the same as on the proxy's machine>   # for this check; or {flag} <file>")),
        (
            SHELL,
            "systemctl restart openclaw-mcp-proxy   # if the proxy's own setting was changed since it was started"
                .into(),
        ),
    ]
}

pub(super) fn needs_token(name: &str) -> Vec<Fix> {
    vec![
        (SETTING, format!("{name}=<openclaw-mcp-proxy token prints one>   # where the proxy runs")),
        (NGINX, "and remove 'proxy_set_header Authorization \"Bearer …\"': it would let everybody in".into()),
    ]
}

pub(super) fn swapped() -> Vec<Fix> {
    lines(&[
        (SETTING, "OPENCLAW_PROXY_APP_TOKEN=<what apps send>"),
        (
            SETTING,
            "OPENCLAW_PROXY_OPENCLAW_TOKEN=<what OpenClaw sends>   # exchange the two, here or where the proxy runs",
        ),
    ])
}

pub(super) fn same_tokens() -> Vec<Fix> {
    lines(&[(SETTING, "OPENCLAW_PROXY_OPENCLAW_TOKEN=<another one: openclaw-mcp-proxy token>")])
}

pub(super) fn forwarded_proto(base: &Base) -> Vec<Fix> {
    let mut fixes = lines(&[
        (NGINX, "proxy_set_header X-Forwarded-Proto $scheme;"),
        (HAPROXY, "http-request set-header X-Forwarded-Proto https"),
        (CADDY, "remove 'header_up -X-Forwarded-Proto'"),
    ]);
    fixes.push(public_url(base));
    fixes
        .push((SETTING, "OPENCLAW_PROXY_TRUSTED_PROXIES=<the front's address>   # if it is on another machine".into()));
    fixes
}

pub(super) fn forwarded_host(base: &Base) -> Vec<Fix> {
    let mut fixes = lines(&[
        (
            NGINX,
            "proxy_set_header Host $http_host; proxy_set_header X-Forwarded-Host $http_host;   # $host loses the port",
        ),
        (HAPROXY, "http-request set-header X-Forwarded-Host %[req.hdr(Host)]"),
        (CADDY, "remove 'header_up Host' and 'header_up X-Forwarded-Host'"),
    ]);
    fixes.push(public_url(base));
    fixes
}

pub(super) fn prefix(base: &Base) -> Vec<Fix> {
    vec![public_url(base)]
}

pub(super) fn spoofed(base: &Base) -> Vec<Fix> {
    let mut fixes = lines(&[
        (NGINX, "proxy_set_header X-Forwarded-Host $http_host; proxy_set_header X-Forwarded-Proto $scheme;"),
        (HAPROXY, "http-request set-header X-Forwarded-Host %[req.hdr(Host)]"),
        (HAPROXY, "http-request set-header X-Forwarded-Proto https"),
        (CADDY, "remove trusted_proxies, or name there only proxies of your own"),
    ]);
    fixes.push(public_url(base));
    fixes
}

pub(super) fn methods(method: &str) -> Vec<Fix> {
    vec![
        (
            NGINX,
            format!(
                "limit_except GET POST PUT DELETE OPTIONS {{ deny all; }}   # {method} is missing; or no limit_except"
            ),
        ),
        (HAPROXY, "http-request deny unless { method GET POST PUT DELETE OPTIONS }".into()),
        (CADDY, format!("method GET POST PUT DELETE OPTIONS   # in the matcher; {method} is missing")),
    ]
}

pub(super) fn upgrade() -> Vec<Fix> {
    lines(&[
        (NGINX, "proxy_http_version 1.1;"),
        (NGINX, "proxy_set_header Upgrade $http_upgrade;"),
        (NGINX, "proxy_set_header Connection \"upgrade\";"),
        (HAPROXY, "remove 'http-request del-header Upgrade' and 'option httpclose'"),
        (CADDY, "reverse_proxy 127.0.0.1:8000   # without header_up Upgrade and header_up Connection"),
    ])
}

pub(super) fn subprotocol() -> Vec<Fix> {
    lines(&[
        (NGINX, "remove 'proxy_set_header Sec-WebSocket-Protocol'"),
        (HAPROXY, "remove 'http-request del-header Sec-WebSocket-Protocol'"),
        (CADDY, "remove 'header_up -Sec-WebSocket-Protocol'"),
    ])
}

pub(super) fn unchanged() -> Vec<Fix> {
    lines(&[
        (NGINX, "remove sub_filter, and modules that read or rewrite JSON, from /v1/"),
        (HAPROXY, "remove filters and Lua that rewrite bodies"),
        (CADDY, "remove 'replace' and 'templates' from /v1/*"),
    ])
}

pub(super) fn compression() -> Vec<Fix> {
    lines(&[
        (NGINX, "gzip off;"),
        (HAPROXY, "remove 'compression algo' and 'filter compression'"),
        (CADDY, "remove 'encode', or: encode { match { not path /v1/* } }"),
    ])
}

pub(super) fn session_headers(headers: &[&str]) -> Vec<Fix> {
    let mut fixes = Vec::new();
    for header in headers {
        fixes.push((
            NGINX,
            format!("proxy_set_header {header} $http_{};", header.to_ascii_lowercase().replace('-', "_")),
        ));
        fixes.push((HAPROXY, format!("remove 'http-request del-header {header}'")));
        fixes.push((CADDY, format!("remove 'header_up -{header}'")));
    }
    fixes
}

pub(super) fn mcp_headers(header: &str) -> Vec<Fix> {
    if header.contains('_') {
        return lines(&[
            (NGINX, "ignore_invalid_headers off;   # in the first server of the port"),
            (HAPROXY, "remove 'http-request del-header' with a pattern that '_' matches"),
            (CADDY, "remove 'header_up -Mcp-Param-*'"),
        ]);
    }
    session_headers(&[header])
}

pub(super) fn origin() -> Vec<Fix> {
    lines(&[
        (NGINX, "remove 'proxy_set_header Origin'"),
        (HAPROXY, "remove 'http-request del-header Origin' and 'http-request set-header Origin'"),
        (CADDY, "remove 'header_up Origin' and 'header_up -Origin'"),
        (SETTING, "OPENCLAW_PROXY_ALLOWED_ORIGINS=<only pages of your own>"),
    ])
}

pub(super) fn cors() -> Vec<Fix> {
    lines(&[
        (NGINX, "remove 'add_header Access-Control-Allow-Origin'"),
        (HAPROXY, "remove 'http-response set-header Access-Control-Allow-Origin'"),
        (CADDY, "remove 'header Access-Control-Allow-Origin'"),
        (SETTING, "OPENCLAW_PROXY_ALLOWED_ORIGINS=https://<the page>   # the proxy answers CORS by itself"),
    ])
}

pub(super) fn body_size(bytes: usize) -> Vec<Fix> {
    let mib = bytes.div_ceil(1024 * 1024);
    vec![
        (NGINX, format!("client_max_body_size {}m;", (4 * mib).max(16))),
        (HAPROXY, "remove 'http-request deny … if { req.body_size gt … }'".into()),
        (CADDY, format!("request_body {{ max_size {}MB }}", (4 * mib).max(16))),
    ]
}

pub(super) fn streaming() -> Vec<Fix> {
    lines(&[
        (NGINX, "proxy_buffering off;"),
        (NGINX, "gzip off;   # and no proxy_ignore_headers X-Accel-Buffering"),
        (HAPROXY, "remove 'option http-buffer-request' and 'compression algo'"),
        (CADDY, "remove 'encode' and response_buffers"),
    ])
}

pub(super) fn cancel() -> Vec<Fix> {
    lines(&[
        (NGINX, "proxy_ignore_client_abort off;"),
        (HAPROXY, "option abortonclose"),
        (CADDY, "remove 'flush_interval -1'"),
    ])
}

pub(super) fn idle() -> Vec<Fix> {
    lines(&[
        (NGINX, "proxy_read_timeout 150s;"),
        (NGINX, "proxy_send_timeout 150s;"),
        (HAPROXY, "timeout tunnel 1h"),
        (CADDY, "remove read_timeout and write_timeout, and stream_timeout"),
    ])
}

pub(super) fn long_call() -> Vec<Fix> {
    lines(&[
        (NGINX, "proxy_read_timeout 150s;"),
        (HAPROXY, "timeout server 150s"),
        (HAPROXY, "timeout client 150s"),
        (CADDY, "remove response_header_timeout and read_timeout"),
    ])
}
