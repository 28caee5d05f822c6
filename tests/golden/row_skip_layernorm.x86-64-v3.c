/* FusedGolden_33912b859b0d: row for x86-64-v3 */
#include "tile_kernel.h"
#include "tile_cpu.h"
#include "tile_host.h"
static void run(const int64_t* symbols, const void* const* inputs, void* const* outputs,
                void* scratch, int64_t* copied, int64_t begin, int64_t end) {
    (void)symbols;
    (void)inputs;
    (void)outputs;
    (void)scratch;
    (void)copied;
    const int64_t n0 = symbols[0];
    const float* restrict input0 = (const float*)inputs[0];
    const float* restrict input1 = (const float*)inputs[1];
    const float* restrict input2 = (const float*)inputs[2];
    const float* restrict input3 = (const float*)inputs[3];
    float* restrict output0 = (float*)outputs[0];
    float* restrict output1 = (float*)outputs[1];
    float* restrict s_tile = (float*)((char*)scratch + 0);
    float* restrict s_result = (float*)((char*)scratch + 768);
    float* restrict s_tile1 = (float*)((char*)scratch + 832);
    float* restrict s_result1 = (float*)((char*)scratch + 1600);
    const int64_t t3 = begin * 8;
    const int64_t t4 = end * 8;
    const int64_t t5 = min_i64(t4, n0);
    const int64_t t6 = t5 + 2;
    const int64_t t8 = t3 + 2;
    const int64_t t27 = n0 * 768;
    const int64_t t28 = t27 + 384;
    const int32_t t29 = t28 >= 11184810;
    const int64_t t288 = t3 + 1;
    const int64_t t290 = t5 + 1;
    const int32_t t334 = t28 >= 524288;
    for (int64_t step_7 = t3; step_7 < t6; step_7 += 1) {
        const int32_t t9 = step_7 >= t8;
        const int32_t t10 = step_7 < t5;
        const int32_t t11 = t9 & t10;
        const int64_t t12 = step_7 + 3;
        const int64_t t13 = (t12 & 3);
        const int64_t t15 = step_7 + 2;
        const int64_t t16 = (t15 & 3);
        const int64_t t30 = step_7 * 48;
        const int64_t t31 = t30 + -96;
        const int64_t t38 = (step_7 & 3);
        const int64_t t39 = t38 * 48;
        const int64_t t40 = t13 * 48;
        const int64_t t48 = t16 * 48;
        const int32_t t257 = step_7 >= t3;
        const int32_t t258 = t257 & t10;
        const int32_t t289 = step_7 >= t288;
        const int32_t t291 = step_7 < t290;
        const int32_t t292 = t289 & t291;
        const int32_t t330 = step_7 < t6;
        const int32_t t331 = t9 & t330;
        if (t11) {
            const float t14 = s_result[t13];
            const float t17 = s_result1[t16];
            f32v acc18 = splat_f32(0.0f);
            f32v acc19 = splat_f32(0.0f);
            f32v acc20 = splat_f32(0.0f);
            f32v acc21 = splat_f32(0.0f);
            f32v acc22 = splat_f32(0.0f);
            f32v acc23 = splat_f32(0.0f);
            f32v acc24 = splat_f32(0.0f);
            f32v acc25 = splat_f32(0.0f);
            int64_t j26 = 0;
            const float t42 = t14 / 0x1.8000000000000p+5f;
            const f32v v43 = splat_f32(t42);
            const float t50 = t17 / 0x1.8000000000000p+5f;
            const float t51 = t50 + 0x1.4f8b580000000p-17f;
            const float t52 = rsqrt_f32_s(t51);
            const f32v v53 = splat_f32(t52);
            if (t29) {
                const int64_t head32 = min_i64(48, lanes_to_vector(output0 + t31));
                if (head32 > 0) {
                    const i32v m33 = lanes_below(head32);
                    const f32v v34 = load_masked_f32(input0 + t30 + j26, m33);
                    const f32v v35 = load_masked_f32(input1 + t30 + j26, m33);
                    const f32v v36 = v34 + v35;
                    const f32v v37 = v36;
                    store_masked_f32(s_tile + t39 + j26, m33, v37); // row.py:22
                    acc18 = acc18 + select_f32(m33, v37, splat_f32(0.0f)); // row.py:36
                    const f32v v41 = load_f32(s_tile + t40 + j26);
                    const f32v v44 = v41 - v43;
                    const f32v v45 = v44;
                    store_masked_f32(s_tile1 + t40 + j26, m33, v45); // row.py:22
                    const f32v v46 = v45 * v45;
                    const f32v v47 = v46;
                    acc22 = acc22 + select_f32(m33, v47, splat_f32(0.0f)); // row.py:36
                    const f32v v49 = load_f32(s_tile1 + t48 + j26);
                    const f32v v54 = v49 * v53;
                    const f32v v55 = load_masked_f32(input2 + j26, m33);
                    const f32v v56 = v54 * v55;
                    const f32v v57 = load_masked_f32(input3 + j26, m33);
                    const f32v v58 = v56 + v57;
                    const f32v v59 = v58;
                    store_masked_f32(output0 + t31 + j26, m33, v59); // row.py:27
                    const f32v v60 = load_f32(s_tile + t48 + j26);
                    store_masked_f32(output1 + t31 + j26, m33, v60); // row.py:27
                }
                j26 = head32;
                for (; j26 + 32 <= 48; j26 += 32) {
                    const f32v v64 = load_f32(input0 + t30 + j26);
                    const f32v v65 = load_f32(input1 + t30 + j26);
                    const f32v v66 = v64 + v65;
                    const f32v v67 = v66;
                    store_f32(s_tile + t39 + j26, v67); // row.py:22
                    acc18 = acc18 + v67; // row.py:36
                    const f32v v68 = load_f32(s_tile + t40 + j26);
                    const f32v v69 = v68 - v43;
                    const f32v v70 = v69;
                    store_f32(s_tile1 + t40 + j26, v70); // row.py:22
                    const f32v v71 = v70 * v70;
                    const f32v v72 = v71;
                    acc22 = acc22 + v72; // row.py:36
                    const f32v v73 = load_f32(s_tile1 + t48 + j26);
                    const f32v v74 = v73 * v53;
                    const f32v v75 = load_f32(input2 + j26);
                    const f32v v76 = v74 * v75;
                    const f32v v77 = load_f32(input3 + j26);
                    const f32v v78 = v76 + v77;
                    const f32v v79 = v78;
                    stream_f32(output0 + t31 + j26, v79); // row.py:27
                    const f32v v80 = load_f32(s_tile + t48 + j26);
                    stream_f32(output1 + t31 + j26, v80); // row.py:27
                    const int64_t j61 = j26 + 8;
                    const f32v v81 = load_f32(input0 + t30 + j61);
                    const f32v v82 = load_f32(input1 + t30 + j61);
                    const f32v v83 = v81 + v82;
                    const f32v v84 = v83;
                    store_f32(s_tile + t39 + j61, v84); // row.py:22
                    acc19 = acc19 + v84; // row.py:36
                    const f32v v85 = load_f32(s_tile + t40 + j61);
                    const f32v v86 = v85 - v43;
                    const f32v v87 = v86;
                    store_f32(s_tile1 + t40 + j61, v87); // row.py:22
                    const f32v v88 = v87 * v87;
                    const f32v v89 = v88;
                    acc23 = acc23 + v89; // row.py:36
                    const f32v v90 = load_f32(s_tile1 + t48 + j61);
                    const f32v v91 = v90 * v53;
                    const f32v v92 = load_f32(input2 + j61);
                    const f32v v93 = v91 * v92;
                    const f32v v94 = load_f32(input3 + j61);
                    const f32v v95 = v93 + v94;
                    const f32v v96 = v95;
                    stream_f32(output0 + t31 + j61, v96); // row.py:27
                    const f32v v97 = load_f32(s_tile + t48 + j61);
                    stream_f32(output1 + t31 + j61, v97); // row.py:27
                    const int64_t j62 = j26 + 16;
                    const f32v v98 = load_f32(input0 + t30 + j62);
                    const f32v v99 = load_f32(input1 + t30 + j62);
                    const f32v v100 = v98 + v99;
                    const f32v v101 = v100;
                    store_f32(s_tile + t39 + j62, v101); // row.py:22
                    acc20 = acc20 + v101; // row.py:36
                    const f32v v102 = load_f32(s_tile + t40 + j62);
                    const f32v v103 = v102 - v43;
                    const f32v v104 = v103;
                    store_f32(s_tile1 + t40 + j62, v104); // row.py:22
                    const f32v v105 = v104 * v104;
                    const f32v v106 = v105;
                    acc24 = acc24 + v106; // row.py:36
                    const f32v v107 = load_f32(s_tile1 + t48 + j62);
                    const f32v v108 = v107 * v53;
                    const f32v v109 = load_f32(input2 + j62);
                    const f32v v110 = v108 * v109;
                    const f32v v111 = load_f32(input3 + j62);
                    const f32v v112 = v110 + v111;
                    const f32v v113 = v112;
                    stream_f32(output0 + t31 + j62, v113); // row.py:27
                    const f32v v114 = load_f32(s_tile + t48 + j62);
                    stream_f32(output1 + t31 + j62, v114); // row.py:27
                    const int64_t j63 = j26 + 24;
                    const f32v v115 = load_f32(input0 + t30 + j63);
                    const f32v v116 = load_f32(input1 + t30 + j63);
                    const f32v v117 = v115 + v116;
                    const f32v v118 = v117;
                    store_f32(s_tile + t39 + j63, v118); // row.py:22
                    acc21 = acc21 + v118; // row.py:36
                    const f32v v119 = load_f32(s_tile + t40 + j63);
                    const f32v v120 = v119 - v43;
                    const f32v v121 = v120;
                    store_f32(s_tile1 + t40 + j63, v121); // row.py:22
                    const f32v v122 = v121 * v121;
                    const f32v v123 = v122;
                    acc25 = acc25 + v123; // row.py:36
                    const f32v v124 = load_f32(s_tile1 + t48 + j63);
                    const f32v v125 = v124 * v53;
                    const f32v v126 = load_f32(input2 + j63);
                    const f32v v127 = v125 * v126;
                    const f32v v128 = load_f32(input3 + j63);
                    const f32v v129 = v127 + v128;
                    const f32v v130 = v129;
                    stream_f32(output0 + t31 + j63, v130); // row.py:27
                    const f32v v131 = load_f32(s_tile + t48 + j63);
                    stream_f32(output1 + t31 + j63, v131); // row.py:27
                }
                for (; j26 + 8 <= 48; j26 += 8) {
                    const f32v v132 = load_f32(input0 + t30 + j26);
                    const f32v v133 = load_f32(input1 + t30 + j26);
                    const f32v v134 = v132 + v133;
                    const f32v v135 = v134;
                    store_f32(s_tile + t39 + j26, v135); // row.py:22
                    acc18 = acc18 + v135; // row.py:36
                    const f32v v136 = load_f32(s_tile + t40 + j26);
                    const f32v v137 = v136 - v43;
                    const f32v v138 = v137;
                    store_f32(s_tile1 + t40 + j26, v138); // row.py:22
                    const f32v v139 = v138 * v138;
                    const f32v v140 = v139;
                    acc22 = acc22 + v140; // row.py:36
                    const f32v v141 = load_f32(s_tile1 + t48 + j26);
                    const f32v v142 = v141 * v53;
                    const f32v v143 = load_f32(input2 + j26);
                    const f32v v144 = v142 * v143;
                    const f32v v145 = load_f32(input3 + j26);
                    const f32v v146 = v144 + v145;
                    const f32v v147 = v146;
                    stream_f32(output0 + t31 + j26, v147); // row.py:27
                    const f32v v148 = load_f32(s_tile + t48 + j26);
                    stream_f32(output1 + t31 + j26, v148); // row.py:27
                }
                if (j26 < 48) {
                    const i32v m149 = lanes_below(48 - j26);
                    const f32v v150 = load_masked_f32(input0 + t30 + j26, m149);
                    const f32v v151 = load_masked_f32(input1 + t30 + j26, m149);
                    const f32v v152 = v150 + v151;
                    const f32v v153 = v152;
                    store_masked_f32(s_tile + t39 + j26, m149, v153); // row.py:22
                    acc18 = acc18 + select_f32(m149, v153, splat_f32(0.0f)); // row.py:36
                    const f32v v154 = load_f32(s_tile + t40 + j26);
                    const f32v v155 = v154 - v43;
                    const f32v v156 = v155;
                    store_masked_f32(s_tile1 + t40 + j26, m149, v156); // row.py:22
                    const f32v v157 = v156 * v156;
                    const f32v v158 = v157;
                    acc22 = acc22 + select_f32(m149, v158, splat_f32(0.0f)); // row.py:36
                    const f32v v159 = load_f32(s_tile1 + t48 + j26);
                    const f32v v160 = v159 * v53;
                    const f32v v161 = load_masked_f32(input2 + j26, m149);
                    const f32v v162 = v160 * v161;
                    const f32v v163 = load_masked_f32(input3 + j26, m149);
                    const f32v v164 = v162 + v163;
                    const f32v v165 = v164;
                    store_masked_f32(output0 + t31 + j26, m149, v165); // row.py:27
                    const f32v v166 = load_f32(s_tile + t48 + j26);
                    store_masked_f32(output1 + t31 + j26, m149, v166); // row.py:27
                }
            }
            else {
                for (; j26 + 32 <= 48; j26 += 32) {
                    const f32v v170 = load_f32(input0 + t30 + j26);
                    const f32v v171 = load_f32(input1 + t30 + j26);
                    const f32v v172 = v170 + v171;
                    const f32v v173 = v172;
                    store_f32(s_tile + t39 + j26, v173); // row.py:22
                    acc18 = acc18 + v173; // row.py:36
                    const f32v v174 = load_f32(s_tile + t40 + j26);
                    const f32v v175 = v174 - v43;
                    const f32v v176 = v175;
                    store_f32(s_tile1 + t40 + j26, v176); // row.py:22
                    const f32v v177 = v176 * v176;
                    const f32v v178 = v177;
                    acc22 = acc22 + v178; // row.py:36
                    const f32v v179 = load_f32(s_tile1 + t48 + j26);
                    const f32v v180 = v179 * v53;
                    const f32v v181 = load_f32(input2 + j26);
                    const f32v v182 = v180 * v181;
                    const f32v v183 = load_f32(input3 + j26);
                    const f32v v184 = v182 + v183;
                    const f32v v185 = v184;
                    store_f32(output0 + t31 + j26, v185); // row.py:27
                    const f32v v186 = load_f32(s_tile + t48 + j26);
                    store_f32(output1 + t31 + j26, v186); // row.py:27
                    const int64_t j167 = j26 + 8;
                    const f32v v187 = load_f32(input0 + t30 + j167);
                    const f32v v188 = load_f32(input1 + t30 + j167);
                    const f32v v189 = v187 + v188;
                    const f32v v190 = v189;
                    store_f32(s_tile + t39 + j167, v190); // row.py:22
                    acc19 = acc19 + v190; // row.py:36
                    const f32v v191 = load_f32(s_tile + t40 + j167);
                    const f32v v192 = v191 - v43;
                    const f32v v193 = v192;
                    store_f32(s_tile1 + t40 + j167, v193); // row.py:22
                    const f32v v194 = v193 * v193;
                    const f32v v195 = v194;
                    acc23 = acc23 + v195; // row.py:36
                    const f32v v196 = load_f32(s_tile1 + t48 + j167);
                    const f32v v197 = v196 * v53;
                    const f32v v198 = load_f32(input2 + j167);
                    const f32v v199 = v197 * v198;
                    const f32v v200 = load_f32(input3 + j167);
                    const f32v v201 = v199 + v200;
                    const f32v v202 = v201;
                    store_f32(output0 + t31 + j167, v202); // row.py:27
                    const f32v v203 = load_f32(s_tile + t48 + j167);
                    store_f32(output1 + t31 + j167, v203); // row.py:27
                    const int64_t j168 = j26 + 16;
                    const f32v v204 = load_f32(input0 + t30 + j168);
                    const f32v v205 = load_f32(input1 + t30 + j168);
                    const f32v v206 = v204 + v205;
                    const f32v v207 = v206;
                    store_f32(s_tile + t39 + j168, v207); // row.py:22
                    acc20 = acc20 + v207; // row.py:36
                    const f32v v208 = load_f32(s_tile + t40 + j168);
                    const f32v v209 = v208 - v43;
                    const f32v v210 = v209;
                    store_f32(s_tile1 + t40 + j168, v210); // row.py:22
                    const f32v v211 = v210 * v210;
                    const f32v v212 = v211;
                    acc24 = acc24 + v212; // row.py:36
                    const f32v v213 = load_f32(s_tile1 + t48 + j168);
                    const f32v v214 = v213 * v53;
                    const f32v v215 = load_f32(input2 + j168);
                    const f32v v216 = v214 * v215;
                    const f32v v217 = load_f32(input3 + j168);
                    const f32v v218 = v216 + v217;
                    const f32v v219 = v218;
                    store_f32(output0 + t31 + j168, v219); // row.py:27
                    const f32v v220 = load_f32(s_tile + t48 + j168);
                    store_f32(output1 + t31 + j168, v220); // row.py:27
                    const int64_t j169 = j26 + 24;
                    const f32v v221 = load_f32(input0 + t30 + j169);
                    const f32v v222 = load_f32(input1 + t30 + j169);
                    const f32v v223 = v221 + v222;
                    const f32v v224 = v223;
                    store_f32(s_tile + t39 + j169, v224); // row.py:22
                    acc21 = acc21 + v224; // row.py:36
                    const f32v v225 = load_f32(s_tile + t40 + j169);
                    const f32v v226 = v225 - v43;
                    const f32v v227 = v226;
                    store_f32(s_tile1 + t40 + j169, v227); // row.py:22
                    const f32v v228 = v227 * v227;
                    const f32v v229 = v228;
                    acc25 = acc25 + v229; // row.py:36
                    const f32v v230 = load_f32(s_tile1 + t48 + j169);
                    const f32v v231 = v230 * v53;
                    const f32v v232 = load_f32(input2 + j169);
                    const f32v v233 = v231 * v232;
                    const f32v v234 = load_f32(input3 + j169);
                    const f32v v235 = v233 + v234;
                    const f32v v236 = v235;
                    store_f32(output0 + t31 + j169, v236); // row.py:27
                    const f32v v237 = load_f32(s_tile + t48 + j169);
                    store_f32(output1 + t31 + j169, v237); // row.py:27
                }
                for (; j26 + 8 <= 48; j26 += 8) {
                    const f32v v238 = load_f32(input0 + t30 + j26);
                    const f32v v239 = load_f32(input1 + t30 + j26);
                    const f32v v240 = v238 + v239;
                    const f32v v241 = v240;
                    store_f32(s_tile + t39 + j26, v241); // row.py:22
                    acc18 = acc18 + v241; // row.py:36
                    const f32v v242 = load_f32(s_tile + t40 + j26);
                    const f32v v243 = v242 - v43;
                    const f32v v244 = v243;
                    store_f32(s_tile1 + t40 + j26, v244); // row.py:22
                    const f32v v245 = v244 * v244;
                    const f32v v246 = v245;
                    acc22 = acc22 + v246; // row.py:36
                    const f32v v247 = load_f32(s_tile1 + t48 + j26);
                    const f32v v248 = v247 * v53;
                    const f32v v249 = load_f32(input2 + j26);
                    const f32v v250 = v248 * v249;
                    const f32v v251 = load_f32(input3 + j26);
                    const f32v v252 = v250 + v251;
                    const f32v v253 = v252;
                    store_f32(output0 + t31 + j26, v253); // row.py:27
                    const f32v v254 = load_f32(s_tile + t48 + j26);
                    store_f32(output1 + t31 + j26, v254); // row.py:27
                }
            }
            const float sum_255 = sum_lanes(acc18 + acc19 + acc20 + acc21); // row.py:36
            const float sum_256 = sum_lanes(acc22 + acc23 + acc24 + acc25); // row.py:36
            s_result[t38] = sum_255; // row.py:36
            s_result1[t13] = sum_256; // row.py:36
        } else {
            if (t258) {
                f32v acc259 = splat_f32(0.0f);
                f32v acc260 = splat_f32(0.0f);
                f32v acc261 = splat_f32(0.0f);
                f32v acc262 = splat_f32(0.0f);
                int64_t j263 = 0;
                for (; j263 + 32 <= 48; j263 += 32) {
                    const f32v v267 = load_f32(input0 + t30 + j263);
                    const f32v v268 = load_f32(input1 + t30 + j263);
                    const f32v v269 = v267 + v268;
                    const f32v v270 = v269;
                    store_f32(s_tile + t39 + j263, v270); // row.py:22
                    acc259 = acc259 + v270; // row.py:36
                    const int64_t j264 = j263 + 8;
                    const f32v v271 = load_f32(input0 + t30 + j264);
                    const f32v v272 = load_f32(input1 + t30 + j264);
                    const f32v v273 = v271 + v272;
                    const f32v v274 = v273;
                    store_f32(s_tile + t39 + j264, v274); // row.py:22
                    acc260 = acc260 + v274; // row.py:36
                    const int64_t j265 = j263 + 16;
                    const f32v v275 = load_f32(input0 + t30 + j265);
                    const f32v v276 = load_f32(input1 + t30 + j265);
                    const f32v v277 = v275 + v276;
                    const f32v v278 = v277;
                    store_f32(s_tile + t39 + j265, v278); // row.py:22
                    acc261 = acc261 + v278; // row.py:36
                    const int64_t j266 = j263 + 24;
                    const f32v v279 = load_f32(input0 + t30 + j266);
                    const f32v v280 = load_f32(input1 + t30 + j266);
                    const f32v v281 = v279 + v280;
                    const f32v v282 = v281;
                    store_f32(s_tile + t39 + j266, v282); // row.py:22
                    acc262 = acc262 + v282; // row.py:36
                }
                for (; j263 + 8 <= 48; j263 += 8) {
                    const f32v v283 = load_f32(input0 + t30 + j263);
                    const f32v v284 = load_f32(input1 + t30 + j263);
                    const f32v v285 = v283 + v284;
                    const f32v v286 = v285;
                    store_f32(s_tile + t39 + j263, v286); // row.py:22
                    acc259 = acc259 + v286; // row.py:36
                }
                const float sum_287 = sum_lanes(acc259 + acc260 + acc261 + acc262); // row.py:36
                s_result[t38] = sum_287; // row.py:36
            }
            if (t292) {
                const float t293 = s_result[t13];
                f32v acc294 = splat_f32(0.0f);
                f32v acc295 = splat_f32(0.0f);
                f32v acc296 = splat_f32(0.0f);
                f32v acc297 = splat_f32(0.0f);
                int64_t j298 = 0;
                const float t303 = t293 / 0x1.8000000000000p+5f;
                const f32v v304 = splat_f32(t303);
                for (; j298 + 32 <= 48; j298 += 32) {
                    const f32v v302 = load_f32(s_tile + t40 + j298);
                    const f32v v305 = v302 - v304;
                    const f32v v306 = v305;
                    store_f32(s_tile1 + t40 + j298, v306); // row.py:22
                    const f32v v307 = v306 * v306;
                    const f32v v308 = v307;
                    acc294 = acc294 + v308; // row.py:36
                    const int64_t j299 = j298 + 8;
                    const f32v v309 = load_f32(s_tile + t40 + j299);
                    const f32v v310 = v309 - v304;
                    const f32v v311 = v310;
                    store_f32(s_tile1 + t40 + j299, v311); // row.py:22
                    const f32v v312 = v311 * v311;
                    const f32v v313 = v312;
                    acc295 = acc295 + v313; // row.py:36
                    const int64_t j300 = j298 + 16;
                    const f32v v314 = load_f32(s_tile + t40 + j300);
                    const f32v v315 = v314 - v304;
                    const f32v v316 = v315;
                    store_f32(s_tile1 + t40 + j300, v316); // row.py:22
                    const f32v v317 = v316 * v316;
                    const f32v v318 = v317;
                    acc296 = acc296 + v318; // row.py:36
                    const int64_t j301 = j298 + 24;
                    const f32v v319 = load_f32(s_tile + t40 + j301);
                    const f32v v320 = v319 - v304;
                    const f32v v321 = v320;
                    store_f32(s_tile1 + t40 + j301, v321); // row.py:22
                    const f32v v322 = v321 * v321;
                    const f32v v323 = v322;
                    acc297 = acc297 + v323; // row.py:36
                }
                for (; j298 + 8 <= 48; j298 += 8) {
                    const f32v v324 = load_f32(s_tile + t40 + j298);
                    const f32v v325 = v324 - v304;
                    const f32v v326 = v325;
                    store_f32(s_tile1 + t40 + j298, v326); // row.py:22
                    const f32v v327 = v326 * v326;
                    const f32v v328 = v327;
                    acc294 = acc294 + v328; // row.py:36
                }
                const float sum_329 = sum_lanes(acc294 + acc295 + acc296 + acc297); // row.py:36
                s_result1[t13] = sum_329; // row.py:36
            }
            if (t331) {
                const float t332 = s_result1[t16];
                int64_t j333 = 0;
                const float t338 = t332 / 0x1.8000000000000p+5f;
                const float t339 = t338 + 0x1.4f8b580000000p-17f;
                const float t340 = rsqrt_f32_s(t339);
                const f32v v341 = splat_f32(t340);
                if (t334) {
                    const int64_t head335 = min_i64(48, lanes_to_vector(output0 + t31));
                    if (head335 > 0) {
                        const i32v m336 = lanes_below(head335);
                        const f32v v337 = load_f32(s_tile1 + t48 + j333);
                        const f32v v342 = v337 * v341;
                        const f32v v343 = load_masked_f32(input2 + j333, m336);
                        const f32v v344 = v342 * v343;
                        const f32v v345 = load_masked_f32(input3 + j333, m336);
                        const f32v v346 = v344 + v345;
                        const f32v v347 = v346;
                        store_masked_f32(output0 + t31 + j333, m336, v347); // row.py:27
                        const f32v v348 = load_f32(s_tile + t48 + j333);
                        store_masked_f32(output1 + t31 + j333, m336, v348); // row.py:27
                    }
                    j333 = head335;
                    for (; j333 + 8 <= 48; j333 += 8) {
                        const f32v v349 = load_f32(s_tile1 + t48 + j333);
                        const f32v v350 = v349 * v341;
                        const f32v v351 = load_f32(input2 + j333);
                        const f32v v352 = v350 * v351;
                        const f32v v353 = load_f32(input3 + j333);
                        const f32v v354 = v352 + v353;
                        const f32v v355 = v354;
                        if (!t29) store_f32(output0 + t31 + j333, v355); else stream_f32(output0 + t31 + j333, v355); // row.py:27
                        const f32v v356 = load_f32(s_tile + t48 + j333);
                        if (!t29) store_f32(output1 + t31 + j333, v356); else stream_f32(output1 + t31 + j333, v356); // row.py:27
                    }
                    if (j333 < 48) {
                        const i32v m357 = lanes_below(48 - j333);
                        const f32v v358 = load_f32(s_tile1 + t48 + j333);
                        const f32v v359 = v358 * v341;
                        const f32v v360 = load_masked_f32(input2 + j333, m357);
                        const f32v v361 = v359 * v360;
                        const f32v v362 = load_masked_f32(input3 + j333, m357);
                        const f32v v363 = v361 + v362;
                        const f32v v364 = v363;
                        store_masked_f32(output0 + t31 + j333, m357, v364); // row.py:27
                        const f32v v365 = load_f32(s_tile + t48 + j333);
                        store_masked_f32(output1 + t31 + j333, m357, v365); // row.py:27
                    }
                }
                else {
                    for (; j333 + 8 <= 48; j333 += 8) {
                        const f32v v366 = load_f32(s_tile1 + t48 + j333);
                        const f32v v367 = v366 * v341;
                        const f32v v368 = load_f32(input2 + j333);
                        const f32v v369 = v367 * v368;
                        const f32v v370 = load_f32(input3 + j333);
                        const f32v v371 = v369 + v370;
                        const f32v v372 = v371;
                        store_f32(output0 + t31 + j333, v372); // row.py:27
                        const f32v v373 = load_f32(s_tile + t48 + j333);
                        store_f32(output1 + t31 + j333, v373); // row.py:27
                    }
                }
            }
        }
    }
    if (t29) streams_done();
}
static int32_t bind(const int64_t* const* shapes, const int32_t* ranks, int64_t* symbols, char* error,
                    size_t error_size) {
    (void)shapes; (void)ranks; (void)symbols; (void)error; (void)error_size;
    TILE_CHECK_RANK(0, 2)
    const int64_t n0 = symbols[0] = shapes[0][0];
    TILE_CHECK_RANK(1, 2)
    TILE_CHECK_RANK(2, 1)
    TILE_CHECK_RANK(3, 1)
    (void)n0;
    TILE_CHECK_DIM(0, 1, INT64_C(48))
    TILE_CHECK_DIM(1, 0, n0)
    TILE_CHECK_DIM(1, 1, INT64_C(48))
    TILE_CHECK_DIM(2, 0, INT64_C(48))
    TILE_CHECK_DIM(3, 0, INT64_C(48))
    return 0;
}
static int64_t tasks(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (int64_t)(floordiv_i64((n0 + INT64_C(7)), INT64_C(8)));
}
static int64_t group(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (int64_t)(INT64_C(1));
}
static size_t scratch_size(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (size_t)(INT64_C(1664));
}
static int64_t work(const int64_t* symbols) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    return (int64_t)((n0 * INT64_C(48)));
}
static void shape(const int64_t* symbols, int32_t output, int64_t* dims) {
    (void)symbols;
    const int64_t n0 = symbols[0]; (void)n0;
    switch (output) {
    case 0: dims[0] = n0; dims[1] = INT64_C(48); break;
    case 1: dims[0] = n0; dims[1] = INT64_C(48); break;
    default: break;
    }
}
static const int32_t input_types[] = {1, 1, 1, 1};
static const tile_dim dims_0[] = {{TILE_DIM_INPUT, 0, 0, 0}, {TILE_DIM_CONST, 0, 0, 48}};
static const tile_dim dims_1[] = {{TILE_DIM_INPUT, 0, 0, 0}, {TILE_DIM_CONST, 0, 0, 48}};
static const tile_output tile_outputs[] = {{1, 2, dims_0}, {1, 2, dims_1}};
const tile_kernel tile_kernel_FusedGolden_33912b859b0d_x86_64_v3 = {
    "FusedGolden_33912b859b0d", 4, 2, input_types, tile_outputs,
    bind, shape, tasks, group, scratch_size, work, run, NULL,
};
