# Writes the configuration of this member of etcd. Its data end with its pod: a member whose data are gone is taken out of the
# cluster and added again, and gets them from the others.
set -eu
{{- $name := printf "%s-etcd" (include "pdserve.name" .) }}
{{- $replicas := until (int .Values.etcd.replicas) }}
certificates=/etc/pdserve/credentials
data=/data
peer="https://$POD_NAME.{{ $name }}:2380"
own="https://$POD_NAME.{{ $name }}:2379"
members="{{ range $i := $replicas }}{{ $name }}-{{ $i }}=https://{{ $name }}-{{ $i }}.{{ $name }}:2380 {{ end }}"
clients="{{ range $i := $replicas }}https://{{ $name }}-{{ $i }}.{{ $name }}:2379 {{ end }}"

ctl() {
    endpoint=$1
    shift
    "$etcdctl" --endpoints="$endpoint" --dial-timeout=1s --command-timeout=2s --cacert="$certificates/ca.pem" \
        --cert="$certificates/node.pem" --key="$certificates/node-key.pem" member "$@"
}
etcdctl=$(python -c 'from pdserve.supervisor.servers import embedded; print(embedded.etcd_binary().with_name("etcdctl"))')
state=new
for client in $clients; do
    [ ! -d "$data/etcd" ] || break                    # the data are there: the rest does not matter
    [ "$client" != "$own" ] || continue
    listed=$(ctl "$client" list) || continue          # it starts too, or the majority is gone
    ours=$(echo "$listed" | grep -F ", $peer," || true)
    state=existing
    case $ours in
        *", unstarted, "*) ;;
        *) [ -z "$ours" ] || ctl "$client" remove "${ours%%,*}"
           ctl "$client" add "$POD_NAME" --peer-urls="$peer" ;;
    esac
    break
done
cat >"$data/etcd.yaml" <<END
name: $POD_NAME
data-dir: $data/etcd
initial-cluster-state: $state
initial-cluster: $(echo $members | tr ' ' ',')
initial-advertise-peer-urls: $peer
listen-peer-urls: https://0.0.0.0:2380
advertise-client-urls: $own
listen-client-urls: https://0.0.0.0:2379
auto-compaction-mode: revision
auto-compaction-retention: "1000"
quota-backend-bytes: 1073741824
log-level: warn
client-transport-security: &tls
  client-cert-auth: true
  trusted-ca-file: $certificates/ca.pem
  cert-file: $certificates/node.pem
  key-file: $certificates/node-key.pem
peer-transport-security: *tls
END
