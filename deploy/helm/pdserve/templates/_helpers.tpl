{{/* Beginning of the names of all objects. */}}
{{- define "pdserve.name" -}}{{ .Values.fullnameOverride | default .Release.Name }}{{- end -}}

{{/* The graph's name: labels and servers are those of the release that it joins. */}}
{{- define "pdserve.plan.graph" -}}{{ .Values.join | default (include "pdserve.name" .) }}{{- end -}}

{{/* A Kubernetes object with changes, as a strategic merge patch makes them: mappings are merged, lists of containers,
volumes, variables and the like by the key of their items; other lists and values are replaced. `base` and `patch` are
any values, `under` is the key at which they are. Returns JSON of {value: ...}. */}}
{{- define "pdserve.merged" -}}
{{- $by := get (dict "containers" "name" "initContainers" "name" "env" "name" "volumes" "name" "imagePullSecrets" "name" "volumeMounts" "mountPath" "ports" "containerPort" "topologySpreadConstraints" "topologyKey" "hostAliases" "ip") .under -}}
{{- $value := .patch -}}
{{- if and (kindIs "map" .base) (kindIs "map" .patch) -}}
{{- $value = deepCopy .base -}}
{{- range $key, $new := .patch -}}
{{- if and (hasKey $value $key) (not (kindIs "invalid" $new)) -}}
{{- $new = (include "pdserve.merged" (dict "base" (get $value $key) "patch" $new "under" $key) | fromJson).value -}}
{{- end -}}
{{- $_ := set $value $key $new -}}
{{- end -}}
{{- else if and $by (kindIs "slice" .base) (kindIs "slice" .patch) -}}
{{- $value = list -}}
{{- $named := dict -}}
{{- range .patch }}{{ $_ := set $named (get . $by | toString) . }}{{ end -}}
{{- range .base -}}
{{- $own := get . $by | toString -}}
{{- $value = append $value (include "pdserve.merged" (dict "base" . "patch" (get $named $own | default dict) "under" "") | fromJson).value -}}
{{- $_ := unset $named $own -}}
{{- end -}}
{{- range .patch }}{{ if hasKey $named (get . $by | toString) }}{{ $value = append $value . }}{{ end }}{{ end -}}
{{- end -}}
{{- dict "value" $value | toJson -}}
{{- end -}}

{{/* A pod template with the values' `pod` of all pods and of this one: root, pod (YAML), own. */}}
{{- define "pdserve.withPod" -}}
{{- $pod := .pod | fromYaml -}}
{{- range list .root.Values.pod .own -}}
{{- $pod = (include "pdserve.merged" (dict "base" $pod "patch" (. | default dict) "under" "") | fromJson).value -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end -}}

{{- define "pdserve.selector" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "pdserve.labels" -}}
{{ include "pdserve.serverLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- end -}}
{{/* Of the pods of NATS and etcd, without a version: an upgrade of pdserve does not restart them. */}}
{{- define "pdserve.serverLabels" -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/part-of: {{ include "pdserve.plan.graph" .root }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pdserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end -}}

{{/* The YAML as text. A name by its content: an upgrade makes another ConfigMap, and pods of the old revision keep theirs. */}}
{{- define "pdserve.yaml" -}}
{{- if kindIs "string" .Values.config }}{{ .Values.config }}{{ else }}{{ toYaml .Values.config }}{{ end -}}
{{- end -}}
{{- define "pdserve.configMap" -}}{{ include "pdserve.name" . }}-graph-{{ include "pdserve.yaml" . | sha256sum | trunc 10 }}{{- end -}}

{{/* A section's keys in kebab-case with those of Common that it lists, as JSON. */}}
{{- define "pdserve.section" -}}
{{- $keys := dict -}}
{{- $own := index .config .name | default dict -}}
{{- range $key, $value := index .config "Common" | default dict -}}
{{- range index $own "common-configs" | default (index $own "common_configs") -}}
{{- if eq (replace "_" "-" .) (replace "_" "-" $key) }}{{ $_ := set $keys (replace "_" "-" $key) $value }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := $own }}{{ $_ := set $keys (replace "_" "-" $key) $value }}{{ end -}}
{{- toJson $keys -}}
{{- end -}}

{{/* A size of the YAML or of Kubernetes, in MiB: 1.5TiB, 4Gi. */}}
{{- define "pdserve.mebibytes" -}}
{{- mulf (regexFind "^[0-9.]+" (toString .)) (get (dict "M" 1 "G" 1024 "T" 1048576) (regexFind "[MGT]" (toString .)) | default 1) -}}
{{- end -}}

{{/* What the YAML says: ports, drain, and for each role its replicas and GPUs; as JSON. */}}
{{- define "pdserve.facts" -}}
{{- $config := include "pdserve.yaml" . | fromYaml -}}
{{- if hasKey $config "Error" }}{{ fail (printf "config is not a YAML mapping (--set-file config=graph.yaml): %s" $config.Error) }}{{ end -}}
{{- $graph := include "pdserve.section" (dict "config" $config "name" "Graph") | fromJson -}}
{{- $front := include "pdserve.section" (dict "config" $config "name" "Frontend") | fromJson -}}
{{- $roles := dict -}}
{{- $processor := include "pdserve.section" (dict "config" $config "name" "Processor") | fromJson -}}
{{- if hasKey $config "Frontend" -}}
{{- $processes := max (dig "ServiceArgs" "workers" 1 $front) (dig "ServiceArgs" "workers" 1 $processor) -}}
{{- $default := ternary 0 $processes (ne .Values.join "") -}}
{{- $replicas := ternary $default .Values.frontend.replicas (kindIs "invalid" .Values.frontend.replicas) | int -}}
{{- if $replicas }}{{ $_ := set $roles "frontend" (dict "replicas" $replicas "gpus" 0 "nodes" 1 "values" .Values.frontend) }}{{ end -}}
{{- end -}}
{{- range $section, $values := dict "VllmWorker" .Values.decode "PrefillWorker" .Values.prefill -}}
{{- if hasKey $config $section -}}
{{- $keys := include "pdserve.section" (dict "config" $config "name" $section) | fromJson -}}
{{- $role := ternary "prefill" ($keys.role | default "decode") (eq $section "PrefillWorker") -}}
{{- $ranks := 1 -}}
{{- range list "tensor-parallel-size" "pipeline-parallel-size" "prefill-context-parallel-size" -}}
{{- $ranks = mul $ranks (index $keys . | default 1 | int) -}}
{{- end -}}
{{- $gpus := dig "ServiceArgs" "resources" "gpu" $ranks $keys | int -}}
{{- if eq ($keys.engine | default "vllm") "sim" }}{{ $gpus = 0 }}{{ end -}}
{{- $host := index $keys "kv-offload" | default "0" -}}
{{- if and (or $gpus (index $keys "kv-offload-disk")) (ge (include "pdserve.mebibytes" $host | float64) (include "pdserve.mebibytes" $.Values.shm | float64)) }}
{{- fail (printf "shm: %s of /dev/shm have no room for kv-offload: %s of %s workers, which lies there, and for vLLM's own: set more, and as much more in resources.limits.memory." $.Values.shm $host $role) }}
{{- end -}}
{{- $replicas := ternary (dig "ServiceArgs" "workers" 1 $keys) $values.replicas (kindIs "invalid" $values.replicas) | int -}}
{{- $nodes := index $keys "nnodes" | default 1 | int -}}
{{- $_ := set $roles $role (dict "replicas" $replicas "gpus" (ternary (div (int $gpus) $nodes) $gpus (gt $nodes 1)) "nodes" $nodes "values" $values) -}}
{{- end -}}
{{- end -}}
{{- $security := include "pdserve.section" (dict "config" $config "name" "Security") | fromJson -}}
{{- $drain := index $graph "drain-timeout" | default 30 -}}
{{- toJson (dict
  "roles" $roles
  "security" $security
  "remote" (or (dig "VllmWorker" "remote-prefill" false $config) (dig "VllmWorker" "remote_prefill" false $config))
  "model" (index $front "served-model-name" | default "MODEL")
  "port" (index $front "port" | default 8000 | int)
  "pages" (index $graph "pages-port" | default 5400 | int)
  "stream" (index $graph "stream-port" | default 5500 | int)
  "drain" (ceil $drain | int)) -}}
{{- end -}}

{{- define "pdserve.nats" -}}
{{- if .Values.nats.servers }}{{ .Values.nats.servers }}{{ else -}}
{{- $name := printf "%s-nats" (include "pdserve.plan.graph" .) -}}
{{- range $i := until (int .Values.nats.replicas) }}{{ if $i }},{{ end }}nats://{{ $name }}-{{ $i }}.{{ $name }}:4222{{ end -}}
{{- end -}}
{{- end -}}
{{- define "pdserve.etcd" -}}
{{- if .Values.etcd.servers }}{{ .Values.etcd.servers }}{{ else -}}
{{- $name := printf "%s-etcd" (include "pdserve.plan.graph" .) -}}
{{- range $i := until (int .Values.etcd.replicas) }}{{ if $i }},{{ end }}{{ $name }}-{{ $i }}.{{ $name }}:2379{{ end -}}
{{- end -}}
{{- end -}}

{{/* Files of the graph's certificates, readable by the pod's group alone. */}}
{{- define "pdserve.credentialsVolume" -}}
name: credentials
secret:
  secretName: {{ .Values.credentials.existingSecret | default (printf "%s-credentials" (include "pdserve.plan.graph" .)) }}
  defaultMode: 0440
  {{- if .Values.credentials.certManager }}
  items:
    - {key: ca.crt, path: ca.pem}
    - {key: tls.crt, path: node.pem}
    - {key: tls.key, path: node-key.pem}
  {{- end }}
{{- end -}}

{{- define "pdserve.podSecurity" -}}
runAsNonRoot: true
{{- if not .Values.openshift }}
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}
{{- define "pdserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The volume source of /models; empty without one. */}}
{{- define "pdserve.modelsVolume" -}}
{{- if .Values.modelsClaim.size -}}
persistentVolumeClaim: {claimName: {{ include "pdserve.name" . }}-models}
{{- else -}}
{{- with .Values.models }}{{ toYaml . }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* A process of pdserve: `keys` is whether it may see API keys, of frontends and the check alone. */}}
{{- define "pdserve.mounts" -}}
- {name: graph, mountPath: /etc/pdserve/graph, readOnly: true}
- {name: home, mountPath: /var/lib/pdserve}
- {name: tmp, mountPath: /tmp}
{{- if include "pdserve.modelsVolume" .root }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if and .keys .root.Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/pdserve/tls, readOnly: true}
{{- end }}
{{- if and .keys .root.Values.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /etc/pdserve/keys, readOnly: true}
{{- end }}
{{- end -}}
{{- define "pdserve.volumes" -}}
- name: home
  {{- .root.Values.home | default (dict "emptyDir" dict) | toYaml | nindent 2 }}
- {name: tmp, emptyDir: {}}
{{- with include "pdserve.modelsVolume" .root }}
- name: models
  {{- . | nindent 2 }}
{{- end }}
{{- if .keys }}
{{- with .root.Values.tls.existingSecret }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- with .root.Values.apiKeys.existingSecret }}
- {name: api-keys, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}
{{- end -}}
{{- define "pdserve.env" -}}
- {name: PDSERVE_STATE_DIR, value: /tmp/pdserve}
- {name: PDSERVE_FRONTEND_HOST, value: {{ ternary "0.0.0.0" "127.0.0.1" .keys | quote }}}
{{- if and .keys .root.Values.apiKeys.existingSecret }}
- {name: PDSERVE_API_KEYS, value: "@/etc/pdserve/keys/api-keys"}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What the pods of NATS and etcd have in common. */}}
{{- define "pdserve.serverPod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 20
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "pdserve.podSecurity" .root | nindent 2 }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "pdserve.selector" . | nindent 14 }}
{{- end -}}
{{- define "pdserve.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "pdserve.name" .root }}-{{ .component }}
  labels:
    {{- include "pdserve.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "pdserve.selector" . | nindent 6 }}
{{- end -}}
{{- define "pdserve.etcdHealth" -}}
exec:
  command:
    - /usr/local/bin/etcdctl
    - --endpoints=https://127.0.0.1:2379
    - --cacert=/etc/pdserve/credentials/ca.pem
    - --cert=/etc/pdserve/credentials/node.pem
    - --key=/etc/pdserve/credentials/node-key.pem
    - endpoint
    - health
periodSeconds: 5
timeoutSeconds: 5
{{- end -}}
{{- define "pdserve.natsHealth" -}}
exec:
  command: [wget, --quiet, --output-document=-, "http://127.0.0.1:8222/healthz?js-enabled-only=true"]
periodSeconds: 5
timeoutSeconds: 5
{{- end -}}
{{/* Pods of the graph, as peers of a NetworkPolicy. */}}
{{- define "pdserve.peers" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: pdserve
      app.kubernetes.io/part-of: {{ include "pdserve.plan.graph" .root }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " .components }}]}
{{- end -}}
