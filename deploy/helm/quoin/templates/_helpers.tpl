{{- define "quoin.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "quoin.name" -}}
{{ if contains "quoin" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-quoin{{ end }}
{{- end }}

{{/* Begins the names of the objects that have the controllers' records. */}}
{{- define "quoin.recordsName" -}}
{{ include "quoin.name" . | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Labels of an object; `of` has the root and the component. */}}
{{- define "quoin.labels" -}}
{{ include "quoin.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "quoin.selector" -}}
app.kubernetes.io/name: quoin
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Addresses of all controllers: a member turns to the one that rules. */}}
{{- define "quoin.controllers" -}}
{{- $name := printf "%s-controller" (include "quoin.name" .) -}}
{{- $namespace := .Release.Namespace -}}
{{- $addresses := list -}}
{{- range $number := until (int .Values.controller.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s.%s.svc:7400" $name $number $name $namespace) -}}
{{- end -}}
{{ join "," $addresses }}
{{- end }}

{{/* What all containers of Quoin have. */}}
{{- define "quoin.container" -}}
image: {{ include "quoin.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}

{{- define "quoin.env" -}}
- { name: QUOIN_LOG, value: {{ .Values.logLevel | quote }} }
- { name: NODE_NAME, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
- { name: POD_NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
- { name: POD_IP, valueFrom: { fieldRef: { fieldPath: status.podIP } } }
{{- end }}

{{/* By which a member joins: the pod's own token for the audience of Quoin, and the cluster's authority. */}}
{{- define "quoin.joining" -}}
- { name: QUOIN_SERVICE_ACCOUNT_TOKEN, value: /var/run/quoin/token }
- { name: QUOIN_AUTHORITY, value: /var/run/quoin/authority }
{{- end }}

{{- define "quoin.joiningMount" -}}
- { name: joining, mountPath: /var/run/quoin, readOnly: true }
{{- end }}

{{- define "quoin.joiningVolume" -}}
- name: joining
  projected:
    sources:
      - serviceAccountToken: { audience: quoin, expirationSeconds: 3600, path: token }
      - configMap:
          name: {{ include "quoin.name" . }}-authority
          items: [{ key: authority, path: authority }]
{{- end }}

{{/* Pods of a node: `of` has the root and the component. */}}
{{- define "quoin.hostPod" -}}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
priorityClassName: {{ .root.Values.priorityClasses.node }}
terminationGracePeriodSeconds: 30
{{- include "quoin.pullSecrets" .root }}
{{- end }}

{{- define "quoin.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "quoin.ready" -}}
readinessProbe:
  httpGet: { path: /healthz, port: metrics }
  periodSeconds: 10
  timeoutSeconds: 5
{{- end }}

{{/* Root with these capabilities alone. */}}
{{- define "quoin.rootWithFew" -}}
securityContext:
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL], add: [IPC_LOCK, SYS_RESOURCE, DAC_OVERRIDE, FOWNER] }
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "quoin.nonRoot" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{/* `of` has the root and the role. */}}
{{- define "quoin.preflight" -}}
{{- if .root.Values.preflight }}
- name: preflight
  {{- include "quoin.container" .root | nindent 2 }}
  command: [quoin, preflight]
  args:
    {{- range .args }}
    - {{ . | quote }}
    {{- end }}
  securityContext: { privileged: true, runAsUser: 0 }
  volumeMounts:
    {{- .mounts | nindent 4 }}
{{- end }}
{{- end }}
